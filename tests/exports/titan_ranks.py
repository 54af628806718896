"""One rank of torchtitan's way with a split: parts are made, filled and trained, beside the plain model.

``titan_ranks.py SCHEDULE`` goes by the recorded hook, ``titan_ranks.py SCHEDULE real`` by torchtitan's own
configurations, model and loss.
"""

import dataclasses
import functools
import itertools
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopipe
from autopipe.errors import InputError
from autopipe.exports import torchtitan_pipelining

ROWS, LENGTH, VOCABULARY = 4, 16, 64
SPLIT = functools.partial(autopipe.split, costs="estimated", device="H200")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.register_buffer("angles", self._table(), persistent=False)

    def _table(self, device=None):
        return torch.linspace(0.0, 1.0, LENGTH, device=device)[:, None]

    def forward(self, x, positions):
        turned = x * torch.cos(self.angles[positions])
        return x + self.down(torch.tanh(self.up(self.norm(turned))))


class Recorded(nn.Module):
    """Made, filled and called as torchtitan's decoders are."""

    def __init__(self, width=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(6)})
        self.scale = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def init_weights(self, buffer_device=None):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        for block in self.layers.values():
            block.angles = block._table(buffer_device or block.up.weight.device)

    def forward(self, tokens, positions=None, attention_masks=None):
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, positions)
        return self.lm_head(x * self.scale)


def loss_fn(output, labels, global_valid_tokens):
    loss = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / global_valid_tokens, {}


def recorded(schedule):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    dims = types.SimpleNamespace(world_size=2, pp=2, get_mesh=lambda name: mesh[name])
    parallelism = types.SimpleNamespace(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=1,
        pipeline_parallel_schedule_csv="",
    )
    training = types.SimpleNamespace(local_batch_size=ROWS, seq_len=LENGTH)
    others = {"compile_config": None, "ac_config": None, "model_config": None, "parallelize_fn": None}
    given = {"parallel_dims": dims, "parallelism": parallelism, "training": training, **others}
    return Recorded, loss_fn, VOCABULARY, torchtitan_pipelining(SPLIT), given


def real(schedule):
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = "cpu"
    spec = model_registry("debugmodel", attn_backend="flex")
    for layer in spec.model.layers:  # its flex attention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec = dataclasses.replace(spec, pipelining_fn=torchtitan_pipelining(SPLIT))
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=1,
    )
    vocabulary = spec.model.vocab_size
    loss = CrossEntropyLoss.Config(global_vocab_size=vocabulary).build(compile_config=CompileConfig())
    given = {
        "parallel_dims": ParallelDims.from_config(parallelism, 2),
        "parallelism": parallelism,
        "training": TrainingConfig(local_batch_size=ROWS, seq_len=LENGTH, steps=3),
        "compile_config": CompileConfig(),
        "ac_config": None,
        "model_config": spec.model,
        "parallelize_fn": spec.parallelize_fn,
    }
    return spec.model.build, loss, vocabulary, spec.pipelining_fn, given


def check(make, loss_fn, vocabulary, pipelining_fn, given):
    with torch.device("meta"):
        model = make()
    schedule, parts, has_first, has_last = pipelining_fn(
        model, device=torch.device("cpu"), dump_folder="", loss_fn=loss_fn, **given
    )
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        part.train()
    plain = make()
    with torch.no_grad():
        plain.init_weights(buffer_device=None)
    mine = [part.state_dict() for part in parts]
    everyone = [None, None]
    dist.all_gather_object(everyone, [name for state in mine for name in state])
    assert sorted(itertools.chain(*everyone)) == sorted(plain.state_dict())
    assert all(tensor.isfinite().all() for state in mine for tensor in state.values())
    everything = [None, None]
    dist.all_gather_object(everything, {n: t for state in mine for n, t in state.items()})
    plain.load_state_dict({n: t for state in everything for n, t in state.items()})
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (*parts, plain)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions, counted = torch.arange(LENGTH).expand(ROWS, -1), torch.tensor(labels.numel())
        losses = []
        last = {"target": labels, "losses": losses, "loss_kwargs": {"global_valid_tokens": counted}}
        schedule.step(*([inputs] if has_first else []), positions=positions, **(last if has_last else {}))
        expected, _ = loss_fn(plain(inputs, positions=positions), labels, counted)
        expected.backward()
        if has_last:
            torch.testing.assert_close(torch.stack(losses).sum(), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = dict(plain.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(parameter, trained[name], atol=1e-6, rtol=1e-5)


def refusals():
    _, loss, _, hook, given = recorded("1F1B")
    given |= {"device": torch.device("cpu"), "dump_folder": "", "loss_fn": loss}

    def refused(match, **changed):
        with torch.device("meta"):
            model = Recorded()
        with pytest.raises(InputError, match=match):
            hook(model, **{**given, **changed})

    dims, parallelism = vars(given["parallel_dims"]), vars(given["parallelism"])
    refused("4 ranks and its pipeline 2", parallel_dims=types.SimpleNamespace(**{**dims, "world_size": 4}))
    csv = {**parallelism, "pipeline_parallel_schedule_csv": "a.csv"}
    refused("schedule file", parallelism=types.SimpleNamespace(**csv))
    other = {**parallelism, "pipeline_parallel_schedule": "Own"}
    refused("Own is not known", parallelism=types.SimpleNamespace(**other))
    chunked = types.SimpleNamespace(set_lm_head=None)
    refused("the model's head itself", loss_fn=chunked)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "refusals":
        refusals()
    else:
        torch.manual_seed(dist.get_rank())
        check(*(real if "real" in sys.argv else recorded)(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
