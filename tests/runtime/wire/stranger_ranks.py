"""A job of three ranks, forked from this process, and a stranger at its ports."""

from benchmarks.kept.strangers import meet

N_STEPS = 6

if __name__ == "__main__":
    found = meet(N_STEPS)
    assert found.n_losses == 3 * N_STEPS
    assert found.n_connections >= found.n_ports >= 3, found
    assert found.n_keys > 100
    print("met", found)
