"""On several ranks over gloo: the same results as one process, exactly."""

import pytest
import runtime_ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_ranks_equal_one_process(n_ranks):
    runtime_ranks.run("everything", n_ranks, timeout_s=150)


@pytest.mark.timeout(120)
def test_blocking_rendezvous_is_enough():
    runtime_ranks.run("rendezvous", 3, timeout_s=100)


@pytest.mark.timeout(120)
def test_data_and_tensor_parallel_beside_the_pipeline():
    runtime_ranks.run("replicas", 4, timeout_s=100)


@pytest.mark.timeout(90)
def test_wrapping_unties_nothing_in_silence():
    runtime_ranks.run("wrapping_unties_nothing_in_silence", 2, timeout_s=60)


@pytest.mark.timeout(120)
def test_checkpoints_fit_any_cut(tmp_path):
    runtime_ranks.run("checkpoints", 2, tmp_path, timeout_s=100)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2


@pytest.mark.timeout(120)
def test_weights_come_and_go(tmp_path):
    runtime_ranks.run("weights_come_and_go", 2, tmp_path, timeout_s=100)


@pytest.mark.timeout(90)
def test_messages_of_all_sizes():
    runtime_ranks.run("messages_of_all_sizes", 3, timeout_s=80)


@pytest.mark.timeout(90)
def test_a_rank_may_take_its_time_between_steps():
    runtime_ranks.run("patience", 2, timeout_s=60)


@pytest.mark.timeout(120)
def test_memory_does_not_grow():
    runtime_ranks.run("growth", 2, 300, timeout_s=100)
