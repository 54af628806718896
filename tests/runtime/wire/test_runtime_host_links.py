"""Who finds whom on a host, and that it is who it says; what goes past the group; and the store beside it."""

import gc
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from autopipe.errors import StepError
from autopipe.hardware import DIRECT_BYTES
from autopipe.host_link import MOST_BYTES, SENT, Link
from autopipe.runtime.wire import host_links as links_module
from autopipe.runtime.wire.announcement import Announcement, Form
from autopipe.runtime.wire.board import Board, StoreGone, StoreSilent
from autopipe.runtime.wire.boundary import Edge
from autopipe.runtime.wire.channel import Channel, Values
from autopipe.runtime.wire.failure import POLL_S, Watch
from autopipe.runtime.wire.group import HostGroup
from autopipe.runtime.wire.host_links import connect
from autopipe.runtime.wire.lost_ranks import corner as corner_of
from autopipe.runtime.wire.lost_ranks import end_of_a_replica
from autopipe.runtime.wire.position import Patience, Position
from autopipe.runtime.wire.side_thread import in_side_thread
from autopipe.stages import Section


def board_of(store):
    return Board(store, "links", lambda: 10.0)


def never_mind(rank):
    """Waiting may go on."""


@pytest.fixture
def ends():
    links = [Link(s) for s in socket.socketpair()]
    assert all(link.agree(10) for link in 2 * links)
    for link in links:
        link._socket.settimeout(10)  # a test that would wait forever fails instead
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize("n_bytes", [8, DIRECT_BYTES, MOST_BYTES + 8])
def test_what_a_link_carries_goes_by_it_past_the_group(ends, n_bytes):
    """And what a rank is told of meanwhile ends its wait."""
    sent = torch.randn(n_bytes // 8, dtype=torch.float64)
    failures, by_group = [], []

    def check():
        if failures:
            raise StepError(failures[0])

    class Gloo:
        def __init__(self, end):
            self.link = lambda peer: end

        def send(self, tensor, peer):
            by_group.append(tensor)
            return SENT

        def recv(self, tensor, peer):
            tensor.copy_(by_group[0])
            return SENT

        def wait(self, work):
            check()

    ways = []
    for end in ends:
        group, watch = Gloo(end), SimpleNamespace(raise_if_failed=check)
        channel = Channel(
            SimpleNamespace(n_ranks=2, group=group, control=group, watch=watch), torch.device("cpu")
        )
        channel.signatures = [0, 0]
        source = Section("", 0, 0, (), ("x",), is_last=False)
        edge = Edge(source, Section("", 1, 1, ("x",), (), is_last=True), ("x",))
        edge.begin(2)
        edge.outbox[:] = [([sent], None, (False,))] * 2
        edge.values.settled = {0: Announcement((Form.of(sent),))}
        ways.append(Values(channel, edge, 1))
    found = []
    for m in range(2):
        ways[0].send(m)
        ways[1].recv(m)
    ways[1].take(lambda edge, m, values: found.append(values), 0)
    assert torch.equal(found[0][0], sent)
    assert len(by_group) == (2 if n_bytes > MOST_BYTES else 0)
    failures.append("another rank has failed")
    with pytest.raises(StepError, match="another rank has failed"):
        ways[1].take(lambda edge, m, values: None, 1)


@pytest.mark.timeout(30)
def test_every_pair_is_connected():
    store, links = dist.HashStore(), {}

    def join(rank):
        links[rank] = connect(board_of(store), rank, 3, never_mind)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for a, b in [(0, 1), (1, 2), (2, 0)]:
        links[a][b].send(torch.tensor([a, b]))
        found = links[b][a].recv(torch.zeros(2, dtype=torch.int64))
        found.wait()
        assert found.tensor.tolist() == [a, b]
    for link in [link for mine in links.values() for link in mine.values()]:
        link.close()


def test_ranks_that_do_not_find_each_other_have_no_link():
    board = board_of(dist.HashStore())
    board.post("door/0", "/nowhere/door")
    assert connect(board, 1, 2, never_mind) == {}
    assert board.look("knock/1/0") == ""


def test_waiting_for_a_rank_ends_when_there_is_no_use():
    def give_up(rank):
        raise StepError(f"rank {rank} is gone")

    with pytest.raises(StepError, match="rank 1 is gone"):
        connect(board_of(dist.HashStore()), 0, 2, give_up)


@pytest.mark.timeout(30)
def test_who_knocks_without_the_key_is_turned_away(monkeypatch):
    """Somebody knocks first with bytes of their own; the rank that belongs there still gets its link."""
    store, links, doors = dist.HashStore(), {}, []
    knock = links_module._knock

    def knock_before(path):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            stranger.sendall((1).to_bytes(4, "little") + b"0" * 32)
            doors.append(path)
            return knock(path)

    monkeypatch.setattr(links_module, "_knock", knock_before)
    thread = threading.Thread(target=lambda: links.update(connect(board_of(store), 0, 2, never_mind)))
    thread.start()
    mine = connect(board_of(store), 1, 2, never_mind)
    thread.join(10)
    mine[0].send(torch.tensor([7]))
    found = links[1].recv(torch.zeros(1, dtype=torch.int64))
    found.wait()
    assert found.tensor.item() == 7
    assert doors
    assert not mine[0].is_broken
    links[1].close()
    assert mine[0].is_broken
    mine[0].close()


def test_what_others_write_in_the_store_is_not_there():
    store = dist.HashStore()
    board = board_of(store)
    theirs = dist.PrefixStore(board.name, store)
    for key, value in (("error", "boo"), ("card/1", "{}"), ("left/1", b"\xff" * 40)):
        theirs.set(key, value)
        assert board.look(key) is None
    assert board.post_first("error", "ours") == "ours"
    assert board.post_first("error", "second") == "ours"
    theirs.set("moved", store.get(f"{board.name}/error"))
    assert board.look("moved") is None  # sealed for another place
    assert Board(store, "other", lambda: 10.0).look("error") is None


def test_a_store_that_does_not_answer_stops_nobody_and_may_answer_again():
    board = board_of(dist.HashStore())
    board._line._answer_s = lambda: 0.2
    answers, began = threading.Event(), time.monotonic()
    try:
        with pytest.raises(StoreSilent, match=r"has not answered for \d.*too much to do"):
            board._ask(lambda store: answers.wait(60))
        with pytest.raises(StoreSilent):
            board.look("error")
        assert time.monotonic() - began < 30
    finally:
        answers.set()
    board._line._answer_s = lambda: 60.0
    assert board._line._late.is_done.wait(60)
    assert board.post_first("error", "ours") == "ours"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            dist.DistNetworkError("Broken pipe\nframe #0"),
            r"^the process that hosts the store is gone \(rank 0",
        ),
        (ConnectionResetError("by peer"), r"^the process that hosts the store is gone \(rank 0"),
        (
            dist.DistStoreError("wait timeout\nframe"),
            r"^the job's store failed: DistStoreError: wait timeout$",
        ),
        (ValueError("odd"), r"^the job's store failed: ValueError: odd$"),
    ],
)
def test_a_store_that_is_lost_is_told_from_one_that_fails(error, told):
    def fail(store):
        raise error

    with pytest.raises(StoreGone, match=told) as found:
        board_of(dist.HashStore())._ask(fail)
    assert not isinstance(found.value, StoreSilent)


def test_a_silent_store_ends_no_rank_that_waits_for_nobody():
    store, answers, aborted = dist.HashStore(), threading.Event(), threading.Event()
    board, theirs = board_of(store), board_of(store)
    board._line._answer_s = lambda: 0.2
    position = Position()
    watch = Watch(
        board, 0, 2, position=lambda: position, abort=aborted.set, patience=Patience(0.2, 0.1)
    )  # fmt: skip
    try:
        with pytest.raises(StoreSilent):
            board._ask(lambda store: answers.wait(60))
        assert not aborted.wait(4 * POLL_S)
        assert watch.failure is None
        position.waits_for = 1  # whether that rank is alive cannot be asked
        assert aborted.wait(60)
        assert "has not answered" in watch.failure
    finally:
        answers.set()
        watch.close()
    assert theirs.look("error") is None


def test_a_device_that_failed_is_told_whoever_asks_after_it():
    """Where the device is, is asked of its events, and what failed on it comes back as their answer."""
    store, aborted = dist.HashStore(), threading.Event()

    def position():
        if not aborted.is_set():
            raise RuntimeError("device-side assert")
        return Position()

    watch = Watch(board_of(store), 1, 2, position=position, abort=aborted.set, patience=Patience(60, 0.1))
    try:
        assert aborted.wait(60)
        assert board_of(store).look("error") == watch.failure == "rank 1's device failed: device-side assert"
    finally:
        watch.close()


def test_a_watch_that_its_own_thread_closes_says_that_its_rank_left():
    """Garbage is searched for in any thread, and may be the pipeline that this one watches."""
    store, closed, held = dist.HashStore(), threading.Event(), []

    def position():
        if held:
            held.pop().close()
            closed.set()
        return Position()

    held.append(
        Watch(board_of(store), 1, 2, position=position, abort=lambda: None, patience=Patience(60, 0.1))
    )
    assert closed.wait(60)
    assert "left after batch" in board_of(store).look("left/1")


def test_a_store_that_cannot_be_connected_to_stops_nobody():
    """Its host stopped before: the kernel takes a connection that nobody ever answers."""
    is_over = threading.Event()

    class Stopped:
        def clone(self):
            is_over.wait(20)
            raise RuntimeError("too late")

    board = Board(Stopped(), "stopped", lambda: 0.2)
    for ask in (lambda: board.look("error"), board.connection, lambda: board.post("error", "boo")):
        with pytest.raises(StoreGone):
            ask()
    is_over.set()


def test_corners_of_a_board_are_asked_for_over_one_connection():
    """However many replicas there are, who asks what ended them opens no connection to each."""
    n_made = []

    class Counted:
        def __init__(self, store):
            self.store = store

        def clone(self):
            n_made.append(1)
            return self.store

    board = Board(Counted(dist.HashStore()), "one", lambda: 10.0)
    corners = [board.corner(str(n)) for n in range(8)]
    for n, corner in enumerate(corners):
        corner.post("error", f"of {n}")
    assert [corner.look("error") for corner in corners] == [f"of {n}" for n in range(8)]
    assert board.look("error") is None
    found = end_of_a_replica(board, [(0, 1), (2, 3)], 0)
    assert "[0, 1], [2, 3]) is gone without a word" in found
    board.corner(corner_of((2, 3), 0)).post("error", "out of bricks")
    assert end_of_a_replica(board, [(0, 1), (2, 3)], 0).endswith(
        "ranks [2, 3] of the job, failed: out of bricks"
    )
    assert len(n_made) == 1


def test_a_board_that_nobody_has_keeps_no_thread():
    before = threading.enumerate()
    board = Board(dist.HashStore(), "one", lambda: 10.0)
    (thread,) = [t for t in threading.enumerate() if t not in before]
    corner = board.corner("other")
    board.post("key", "text")
    del board
    assert corner.look("key") is None
    del corner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_work_aside_is_waited_for_as_long_as_there_is_use():
    is_over, started = threading.Event(), threading.Event()

    def check():
        started.wait(20)
        raise KeyError("no use")

    def work():
        started.set()
        is_over.wait(20)

    with pytest.raises(KeyError):
        in_side_thread(work, "a test's", check)
    is_over.set()
    assert in_side_thread(lambda: 3, "a test's", lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        in_side_thread(lambda: 1 / 0, "a test's", lambda: None)


@pytest.mark.parametrize("size", [3, 5000])
def test_lazy_conjugates_and_negatives_cross_as_their_values(size):
    z = torch.randn(size, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag]
    announced = Announcement(tuple(map(Form.of, tensors)))
    found = announced.from_wire([t.view(t.dtype) for t in announced.to_wire(tensors)], torch.device("cpu"))
    assert all(not t.is_conj() and not t.is_neg() for t in announced.to_wire(tensors))
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))


def test_a_group_that_is_closed_is_not_broken_any_more():
    group = HostGroup(dist.HashStore(), [3], 3, 5.0, {})
    group.abort()
    group.close()
    group.close()
    group.abort()
