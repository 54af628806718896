"""What crosses between stages: values go to each rank once, and edges settle only when shapes do."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from runtime_models import Wide, grads, make, worst
from torch.nn import functional as F

from autopipe.accelerator import raw
from autopipe.errors import InputError
from autopipe.plans import Boundary
from autopipe.runtime import Runtime
from autopipe.runtime.data.feed import Feed
from autopipe.runtime.data.microbatch import Batch
from autopipe.runtime.execute.program import compile_program, pick_schedule
from autopipe.runtime.wire.announcement import HOST_PACK_BYTES, LIKE, Announcement, Form
from autopipe.runtime.wire.boundary import SETTLED_AFTER, Book, Frame, edges_between, flatten
from autopipe.simulator import plan_transfers

CPU = torch.device("cpu")
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def wide(**options):
    torch.manual_seed(0)
    model, x = Wide().double(), torch.randn(8, 4, dtype=torch.float64)
    return model, x, *make(model, (x,), {}, **options)


def test_a_value_goes_to_each_rank_once():
    _, _, _, plan, stages = wide(n_stages=6, n_ranks=2, schedule="interleaved")
    edges = edges_between(stages)
    shared = [e for e in edges if "layers_0" in e.names]
    assert [(e.source, e.destination) for e in shared] == [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)]
    assert sum(stages[e.source].rank != stages[e.destination].rank for e in shared) == 1
    boundary = Boundary("layers_0", 0, (1, 2, 3, 4, 5), 8)
    transfers = plan_transfers(dataclasses.replace(plan, boundaries=(boundary,)))
    assert [(t.source, t.destination) for t in transfers] == [(e.source, e.destination) for e in shared]
    program = compile_program(pick_schedule(plan, None, 4), edges, 0)
    sent = [step.message for step in program if step.kind == "send" and step.message.kind == "F"]
    assert {(m.source, m.destination) for m in sent} == {(0, 1), (2, 3), (4, 5)}


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "looped-bfs"])
@pytest.mark.parametrize("recompute", [(), (1, 3)])
def test_values_handed_on_keep_their_gradients(schedule, recompute):
    model, x, *made = wide(n_stages=4, n_ranks=2, schedule=schedule, recompute=recompute)
    plain = copy.deepcopy(model)
    Runtime(*made, loss_fn=F.mse_loss).step(x, target=x)
    F.mse_loss(plain(x), x).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_an_edge_settles_on_equal_messages_only():
    book = Book()
    for _ in range(SETTLED_AFTER):
        book.note(0, "a")
        assert not book.settled
    book.note(0, "a")
    book.note(1, "b")
    assert book.settled == {0: "a", 1: "b"}
    book = Book()
    for i in range(3 * SETTLED_AFTER):
        book.note(0, "ab"[i == 4])
    assert book.varies
    assert not book.settled


def test_frames_travel_without_torchs_own_structures():
    values = [torch.ones(2), {"n": 3, "inner": (None, torch.zeros(1))}]
    tensors, frame = flatten(values)
    again = Frame.from_text(frame.to_text())
    assert isinstance(again, Frame)
    assert again == frame
    assert again.fill(tensors)[1]["n"] == 3


def test_tensors_of_a_message_share_one_until_they_are_large():
    small = [torch.randn(64, 32), torch.randn(3, 5, 7).transpose(0, 2), torch.arange(5)]
    sent = [*small, torch.randn(HOST_PACK_BYTES // 4)]
    told = Announcement(tuple(Form.of(t, t.is_floating_point()) for t in sent))
    wire = told.to_wire(sent)
    assert [t.nbytes >= HOST_PACK_BYTES for t in wire] == [True, False]
    assert [t.shape for t in wire] == [b.shape for b in map(LIKE, told.molds(torch.device("cpu")))]
    found = told.from_wire([t.clone() for t in wire], torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(found, sent, strict=True))
    found[0].zero_()
    assert [t._version for t in found] == [1, 0, 0, 0]  # saved for backward, the others are as they came
    assert torch.equal(found[1], sent[1])


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if not str(d).startswith("torch.q")], ids=str)
def test_every_dtype_is_bytes_on_the_wire(dtype):
    """Several in one message, and one that is large: what comes is what was sent, bit for bit."""
    bits = torch.arange(96, dtype=torch.uint8)
    sent = [bits[:32].view(dtype), bits[32:64].view(dtype).view(-1, 1), bits.repeat(1 << 14).view(dtype)]
    told = Announcement.heard(Announcement(tuple(map(Form.of, sent))).told())
    wire = told.to_wire(sent)
    assert [t.nbytes for t in wire] == [sent[2].nbytes, 64]
    assert [(t.shape, t.dtype) for t in wire] == [(b.shape, b.dtype) for b in map(LIKE, told.molds(CPU))]
    for made, given in zip(told.from_wire(wire, CPU), sent, strict=True):
        assert (made.dtype, made.shape) == (dtype, given.shape)
        assert torch.equal(made.view(-1).view(torch.uint8), given.view(-1).view(torch.uint8))


def one_kind():
    """The kinds of a capture that has one."""
    capture = SimpleNamespace(forms={True: (None,), False: (None,)}, model=SimpleNamespace(training=True))
    capture.kinds = (capture,)
    return [SimpleNamespace(number=0, capture=capture, splitter=SimpleNamespace(read=()))]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["sparse", "quantized"],
)
def test_what_cannot_be_fed_is_refused_before_anything_is_sent(odd, kind):
    stages = [SimpleNamespace(rank=0, inputs=("x",)), SimpleNamespace(rank=1, inputs=("graph",))]
    feed = Feed(0, stages, SimpleNamespace(n_ranks=2), CPU, one_kind())
    whole = {"x": torch.ones(2), "graph": odd()}
    batch = Batch((2,), {name: (value,) for name, value in whole.items()}, [None], {"x": 0}, whole)
    with pytest.raises(InputError, match=f"graph is {kind}, which rank 0 cannot feed to the others"):
        feed.give(batch, None, 1, ([1.0], 2.0))
    with pytest.raises(InputError, match=f"the target is {kind}"):
        feed.give(dataclasses.replace(batch, whole={"x": torch.ones(2)}), odd(), 1, ([1.0], 2.0))


def test_a_target_that_only_its_own_process_can_make_is_refused_before_anything_is_sent():
    stages = [SimpleNamespace(rank=rank, inputs=("x",)) for rank in range(2)]
    feed = Feed(0, stages, SimpleNamespace(n_ranks=2), CPU, one_kind())
    whole = {"x": torch.ones(2)}
    batch = Batch((2,), {"x": (whole["x"],)}, [None], {"x": 0}, whole)
    with pytest.raises(InputError, match=r"rank 0 cannot feed this batch .* made of more than tensors"):
        feed.give(batch, SimpleNamespace(y=torch.ones(2)), 1, ([1.0], 2.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.complex64])
def test_a_lone_element_may_have_any_strides(dtype):
    """It counts as contiguous: the first row and every twelfth column of ids, say."""
    lone, other = torch.arange(12).to(dtype).view(1, 12)[:, ::12], torch.ones(3)
    assert lone.is_contiguous()
    assert lone.stride(-1) == 12
    announced = Announcement((Form.of(lone, False), Form.of(other, False)))
    sent = announced.to_wire([lone, other])
    for got, wanted in zip(announced.from_wire(sent, CPU), (lone, other), strict=True):
        assert torch.equal(got, wanted)
    assert raw(lone).tolist() == raw(lone.clone()).tolist()
