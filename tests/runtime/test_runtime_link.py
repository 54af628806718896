"""Links between ranks of one host: order, dtypes, how much they hold, and how they end."""

import socket
import threading

import pytest
import torch

from autopipe.runtime.wire.announcement import Announcement
from autopipe.runtime.wire.link import LINK_BYTES, Link, connect


class Store(dict):
    """A store of one process; ``get`` waits as torch's does."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self, timeout=10)
            return self[key]


@pytest.fixture
def ends():
    links = [Link(s) for s in socket.socketpair()]
    for link in links:
        link._socket.settimeout(10)  # a test that would wait forever fails instead
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
    ]
    expected = [b.recv(torch.empty_like(t)) for t in sent]
    for tensor in sent:
        a.send(tensor).wait()
    for arrival in reversed(expected):
        arrival.wait()
    assert all(torch.equal(x.tensor, t) for x, t in zip(expected, sent, strict=True))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("n_bytes", [1, 1000, LINK_BYTES - 1])
def test_a_send_ends_once_its_message_is_expected(ends, n_bytes):
    """Both ends send all, each after expecting all: what is expected never fills a socket."""
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
def test_one_way_traffic_is_read_before_the_buffer_is_full(ends):
    a, b = ends
    message = torch.ones(LINK_BYTES // 2, dtype=torch.uint8)
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


@pytest.mark.timeout(30)
def test_every_pair_is_connected():
    store, links = Store(), {}

    def join(rank):
        links[rank] = connect(store, rank, 3)

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
    store = Store()
    store.set("door/0", "/nowhere/door")
    assert connect(store, 1, 2) == {}
    assert store.get("knock/1/0") == b""


@pytest.mark.parametrize("size", [3, 5000])
def test_lazy_conjugates_and_negatives_cross_as_their_values(size):
    z = torch.randn(size, dtype=torch.complex64)
    tensors = [z.conj(), z.conj().imag]
    announced = Announcement(tuple((tuple(t.shape), t.dtype, False) for t in tensors))
    found = announced.from_wire([t.view(t.dtype) for t in announced.to_wire(tensors)])
    assert all(not t.is_conj() and not t.is_neg() for t in announced.to_wire(tensors))
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
