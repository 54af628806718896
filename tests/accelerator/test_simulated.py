"""The simulated accelerator catches each class of wrong program, and passes the right one."""

import json
import signal

import pytest

RACES = ("event_not_awaited", "freed_while_in_use", "overwritten_while_in_use")
OTHERS = (
    "host_reads_too_early",
    "pinned_source_overwritten",
    "another_device_is_awaited",
    "another_device_is_seeded",
    "another_device_is_timed",
    "never_written",
    "on_two_devices",
    "beside_a_cpu_tensor",
    "with_a_generator_of_the_host",
    "index_out_of_range",
    "more_than_fits",
    "host_waits_unasked",
)


@pytest.fixture(scope="module")
def outcomes(on_ranks):
    (output,) = on_ranks("programs.py", 1)
    return json.loads(output.splitlines()[-1])


def test_every_program_is_looked_at(outcomes):
    assert set(outcomes) == {*RACES, *OTHERS}


@pytest.mark.parametrize("name", RACES + OTHERS)
def test_right_programs_pass_and_wrong_ones_are_caught(outcomes, name):
    right, wrong = outcomes[name]["right"], outcomes[name]["wrong"]
    assert right["eager"] == right["late"] == right["lazy"]
    assert not isinstance(right["eager"], str), right
    assert wrong != right


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_told_with_both_its_ends(outcomes, name):
    words = outcomes[name]["wrong"]["eager"]
    assert "race: nothing orders" in words
    assert words.count("stream ") == 2
    assert words.count("aten::") >= 1


def test_the_host_cannot_touch_device_memory(on_ranks):
    with pytest.raises(AssertionError, match=f"exited with -{signal.SIGSEGV.value}"):
        on_ranks("programs.py", 1, "touch")


def test_memory_that_is_in_use_is_not_given_back(on_ranks):
    on_ranks("programs.py", 1, "give_back")


GROUPS = (
    "send_buffer_overwritten",
    "receive_not_awaited",
    "both_send_first",
    "host_blocks_in_a_wait",
    "refused",
    "on_the_host",
    "lost",
)


@pytest.fixture(scope="module")
def on_two_ranks(on_ranks):
    return [json.loads(out.splitlines()[-1]) for out in on_ranks("group_programs.py", 2)]


def test_every_group_program_is_looked_at(on_two_ranks):
    assert all(set(found) == set(GROUPS) for found in on_two_ranks)


@pytest.mark.parametrize("name", GROUPS)
def test_right_messages_pass_and_wrong_ones_are_caught(on_two_ranks, name):
    assert all(found[name]["right"] is True for found in on_two_ranks), on_two_ranks
    assert any(found[name]["wrong"] is not True for found in on_two_ranks), on_two_ranks


def test_an_abort_ends_the_process_unless_it_was_asked_not_to(on_ranks):
    with pytest.raises(AssertionError, match=f"exited with -{signal.SIGABRT.value}"):
        on_ranks("group_programs.py", 2, "torn_down")
