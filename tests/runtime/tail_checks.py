"""Tails that take the whole batch, held against the plain model; what the ranks of their tests do."""

import copy

import torch
import torch.distributed as dist
from tail_models import MODELS, Experts, Mined, Similar, TwoTowers, Views

import autopipe
from autopipe.stages import find_loss
from autopipe.tracing import Capture

ROWS = 7
EXACT = 1e-10


def loss_fn(output, _=None):
    wanted = torch.eye(len(output), dtype=output.dtype, device=output.device)
    return (output - wanted).square().sum() / len(output)


def batch(make_model, n=ROWS):
    return tuple(a.double() if a.is_floating_point() else a for a in MODELS[make_model](n))


def split(make_model, n_stages, n_microbatches=3, **options):
    """A model in fp64, a batch for ragged microbatches, and its pipe; without dropout.

    A capture is cut again, its model left as it is.
    """
    if isinstance(make_model, Capture):
        options = {"costs": "estimated", "n_microbatches": n_microbatches, "time_limit_s": 0.2, **options}
        return None, None, autopipe.split(make_model, n_stages, **options)
    torch.manual_seed(0)
    args, model = batch(make_model), make_model().double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    options = {"costs": "estimated", "n_microbatches": n_microbatches, "time_limit_s": 0.2, **options}
    return model, args, autopipe.split(model, n_stages, args, **options)


def plain(model, *batches):
    """Losses, outputs and a copy of the model with the gradients of their sum."""
    twin, losses, outputs = copy.deepcopy(model), [], []
    for args in batches:
        output = twin(*args)
        loss = find_loss(output)
        loss = loss_fn(output) if loss is None else loss
        loss.backward()
        losses.append(loss.item())
        outputs.append(output)
    return losses, outputs, twin


def runtime_of(pipe, make_model, **options):
    return pipe.runtime(loss_fn if make_model is Similar else None, **options)


def worst(named, twin):
    """The largest difference of gradients, over the largest value of each."""
    wanted, found = dict(twin.named_parameters()), dict(named)
    errors = [0.0]
    for name, p in found.items():
        q = wanted[name].grad
        assert (p.grad is None) == (q is None), name
        if q is not None:
            errors.append(((p.grad.cpu() - q).abs().max() / q.abs().max().clamp(min=1e-3)).item())
    return max(errors)


def leaves(output):
    return [x.cpu() for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]


def same(found, wanted):
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def on_ranks(device=None):
    """Two steps on every rank, of batches that are cut unevenly, and what comes of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    cases = [(TwoTowers, {}), (Experts, {"schedule": "looped-bfs"}), (Mined, {"recompute": "always"})]
    for make_model, options in [*cases, (Similar, {}), (Views, {})]:
        per_rank = 2 if options.get("schedule") == "looped-bfs" else 1
        model, args, pipe = split(make_model, world * per_rank, n_ranks=world, **options)
        other = batch(make_model, 5)
        losses, outputs, twin = plain(model, args, other)
        feed = world - 1 if make_model is Mined else None
        runtime = runtime_of(pipe, make_model, feed=feed, device=device)
        for given, loss, output in zip((args, other), losses, outputs, strict=True):
            found = runtime.step(*(given if feed in (None, rank) else ()), return_outputs=True)
            assert abs(found.loss.item() - loss) < EXACT, make_model
            same(found.outputs, output)
        assert worst(runtime.named_parameters(), twin) < EXACT, make_model
        if feed is None:
            same(runtime.forward(*args), outputs[0])
            assert abs(runtime.evaluate(*args).loss.item() - losses[0]) < EXACT
        assert runtime.report().n_steps == 2
