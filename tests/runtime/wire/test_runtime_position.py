"""Where a rank is: read off one number while a program runs, off events where a device is behind the host."""

import dataclasses

from autopipe.runtime.wire.position import Position

PROGRAM = (("0F0", -1), ("recv B1 from rank 1", 1), ("0B0", -1))


@dataclasses.dataclass
class Mark:
    """An event of a device, which it has passed or not."""

    is_passed: bool = False

    def query(self):
        return self.is_passed


def told(position):
    seen = position.seen()
    return seen.index, seen.words, seen.waits_for


def test_what_the_host_does_is_told_by_its_index():
    position = Position(index=5, words="the start of a step", waits_for=-1)
    position.follow(PROGRAM, ())
    assert told(position) == (5, "the start of a step", -1)
    for position.index, (words, rank) in enumerate(PROGRAM, 6):
        assert told(position) == (position.index, words, rank)
    position.index = 7
    position.settle()  # where it failed, say
    assert (position.words, position.waits_for) == PROGRAM[1]
    position.words, position.waits_for = "sharing the loss", 0
    assert told(position) == (7, "sharing the loss", 0)


def test_a_device_behind_the_host_is_told_by_its_events():
    marks: list[Mark] = []
    position = Position(index=-1, words="the start of a step")
    position.follow(PROGRAM, marks)
    marks += [Mark(is_passed=True), *(Mark() for _ in PROGRAM)]  # ahead of the first call, and after each
    position.index = 2
    position.settle()
    last = Mark()
    position.words = "the user's own code"
    position.follow_to("the loss of all ranks", 0, last)
    for n_passed, (words, rank) in enumerate(PROGRAM):
        assert told(position) == (-4 - n_passed, words, rank)
        marks[n_passed + 1].is_passed = True
    assert told(position)[1:] == ("the loss of all ranks", 0)
    last.is_passed = True
    assert told(position) == (2, "the user's own code", -1)
