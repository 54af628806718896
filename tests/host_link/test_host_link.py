"""A link between two processes of a host: order, dtypes, how much it holds, and how it ends."""

import os
import pathlib
import socket
import threading

import pytest
import torch

from autopipe.hardware import DIRECT_BYTES
from autopipe.host_link import Link
from autopipe.host_link import link as link_module
from autopipe.host_link import ring as ring_module
from autopipe.host_link.ring import Ring

SHARED = 1 << 17
"""Bytes of the shared memory of these tests: messages soon go round in it."""


def agreed():
    links = [Link(s) for s in socket.socketpair()]
    assert all(link.agree(10) for link in 2 * links)
    for link in links:
        link._socket.settimeout(10)  # a test that would wait forever fails instead
    return links


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(Ring, "n_bytes", SHARED)
    monkeypatch.setattr(link_module, "MOST_BYTES", SHARED // 2)


@pytest.fixture
def ends():
    links = agreed()
    yield links
    for link in links:
        link.close()


def test_tensors_arrive_in_the_order_sent_however_they_are_waited_for(ends):
    a, b = ends
    sent = [
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.randn(5000, requires_grad=True),
        torch.randn(9000, dtype=torch.complex64),
        torch.rand(40_000) > 0.5,
        torch.tensor(7),
        torch.randn(3, 5000, dtype=torch.bfloat16),
    ]
    expected = [b.recv(torch.empty_like(t)) for t in sent]
    for tensor in sent:
        a.send(tensor).wait()
    for arrival in reversed(expected):
        arrival.wait()
    assert all(torch.equal(x.tensor, t) for x, t in zip(expected, sent, strict=True))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("n_bytes", [1, 1000, DIRECT_BYTES - 1, DIRECT_BYTES, 50_000, SHARED // 2])
def test_a_send_ends_once_its_message_is_expected(ends, n_bytes):
    """Both ends send all, each after expecting all: what is expected never fills a socket or the memory."""
    n_messages = 40
    problems = []

    def run(link, value):
        arrivals = []
        message = torch.full((n_bytes,), value, dtype=torch.uint8)
        for _ in range(n_messages):  # the order a rendezvous allows: one side first, then the other
            if value == 1:
                link.send(message)
            arrivals.append(link.recv(torch.empty_like(message)))
            if value == 2:
                link.send(message)
        for arrival in arrivals:
            arrival.wait()
            if not torch.all(arrival.tensor == 3 - value):
                problems.append(value)

    threads = [threading.Thread(target=run, args=(link, i)) for i, link in enumerate(ends, start=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems


@pytest.mark.timeout(30)
@pytest.mark.parametrize("n_bytes", [DIRECT_BYTES // 2, 50_000])
def test_one_way_traffic_is_read_before_there_is_no_room(ends, n_bytes):
    a, b = ends
    message = torch.ones(n_bytes, dtype=torch.uint8)
    done = threading.Event()

    def send():
        for _ in range(20):
            a.send(message)
        done.set()

    thread = threading.Thread(target=send)
    thread.start()
    arrivals = [b.recv(torch.empty_like(message)) for _ in range(20)]
    assert done.wait(10), "nobody waited for a message, yet all were expected"
    thread.join()
    arrivals[-1].wait()
    assert torch.equal(arrivals[0].tensor, message)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_broken_link_raises(ends, end):
    a, b = ends
    a.send(torch.ones(2))
    waited = b.recv(torch.empty(3))
    getattr(a, end)()
    with pytest.raises(ConnectionError):
        waited.wait()


@pytest.mark.timeout(30)
def test_abort_ends_a_wait_of_its_own_side(ends):
    a, _ = ends
    threading.Timer(0.2, a.abort).start()
    with pytest.raises(ConnectionError):
        a.recv(torch.empty(3)).wait()


def test_messages_of_any_size_arrive_whole_wherever_they_lie(ends):
    """In the shared memory a message may go round, or begin anew where all of it is free."""
    a, b = ends
    drawn = torch.Generator().manual_seed(0)
    coming = []
    for _ in range(200):
        n = int(torch.randint(1, SHARED // 2 + 1, (), generator=drawn))
        sent = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=drawn)
        arrival = b.recv(torch.empty_like(sent))
        a.send(sent)
        coming.append((arrival, sent))
        if len(coming) > int(torch.randint(0, 3, (), generator=drawn)):
            arrival, sent = coming.pop(0)
            arrival.wait()
            assert torch.equal(arrival.tensor, sent)
    coming[-1][0].wait()
    assert all(torch.equal(arrival.tensor, sent) for arrival, sent in coming)


def test_shared_memory_is_no_more_than_was_under_way(ends, monkeypatch):
    a, b = ends
    message = torch.ones(40_000, dtype=torch.uint8)
    for _ in range(20):
        arrival = b.recv(torch.empty_like(message))
        a.send(message)
        arrival.wait()
    taken = os.fstat(a._out.ring.files[0]).st_blocks * 512
    assert 40_000 <= taken < 60_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize("end", ["the other's", "its own"])
def test_who_waits_for_room_hears_that_the_link_is_broken(ends, end):
    a, b = ends
    message = torch.ones(SHARED // 2, dtype=torch.uint8)
    a.send(message)
    a.send(message)
    threading.Timer(0.2, b.close if end == "the other's" else a.abort).start()
    with pytest.raises(ConnectionError):
        a.send(message)


@pytest.mark.parametrize("lacking", ["memfd_create", "eventfd", "mmap"])
@pytest.mark.parametrize("which", ["one", "both"])
def test_without_memory_to_share_a_link_carries_what_its_socket_holds(monkeypatch, lacking, which):
    """Both ends carry the same, whichever of them has none."""
    pair = socket.socketpair()
    links = [Link(pair[0])] if which == "one" else []

    def refuse(*_):
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(ring_module.mmap if lacking == "mmap" else os, lacking, refuse)
        links += [Link(s) for s in pair[len(links) :]]
    assert all(link.agree(10) for link in 2 * links)
    assert [link.below_bytes for link in links] == [DIRECT_BYTES] * 2
    sent = torch.randn(10)
    arrival = links[1].recv(torch.empty(10))
    links[0].send(sent)
    arrival.wait()
    assert torch.equal(arrival.tensor, sent)
    for link in links:
        link.close()


@pytest.mark.parametrize("cannot", ["map", "hold"])
def test_an_end_that_cannot_open_the_others_memory_says_so(monkeypatch, cannot):
    """Its address space or its files may be limited; both ends then carry what the socket holds."""
    links = [Link(s) for s in socket.socketpair()]
    before = len([*pathlib.Path("/proc/self/fd").iterdir()])

    def refuse(*_):
        raise OSError("cannot allocate memory")

    def cut_off(connection, n_bytes, n_files):
        said, files, *rest = recv_fds(connection, n_bytes, n_files)
        os.close(files.pop())
        return said, files, *rest

    recv_fds = socket.recv_fds
    with monkeypatch.context() as patched:
        if cannot == "map":
            patched.setattr(ring_module.mmap, "mmap", refuse)
        else:
            patched.setattr(socket, "recv_fds", cut_off)
        assert links[0].agree(10)
    assert links[1].agree(10)
    assert all(link.agree(10) for link in links)
    assert [link.below_bytes for link in links] == [DIRECT_BYTES] * 2
    # what the one could open it holds: its counterpart's two files, and the memory's once more
    assert len([*pathlib.Path("/proc/self/fd").iterdir()]) == before + 3
    arrival = links[0].recv(torch.empty(10))
    links[1].send(torch.ones(10))
    arrival.wait()
    assert torch.equal(arrival.tensor, torch.ones(10))
    for link in links:
        link.close()


def test_an_end_that_says_nothing_is_not_waited_for_and_one_that_is_gone_is_told():
    mine, theirs = socket.socketpair()
    link = Link(mine)
    assert not link.agree(0.01)
    theirs.close()
    with pytest.raises(ConnectionError):
        link.agree(10)
    link.close()


def test_a_link_leaves_no_files_open():
    before = len([*pathlib.Path("/proc/self/fd").iterdir()])
    links = agreed()
    for link in links:
        link.close()
    assert len([*pathlib.Path("/proc/self/fd").iterdir()]) == before
