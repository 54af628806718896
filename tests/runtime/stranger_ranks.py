"""A job of three ranks, forked from this process, and a stranger at its ports."""

from benchmarks.kept.strangers import meet

if __name__ == "__main__":
    found = meet(20)
    assert found.n_losses == 3 * 20
    assert found.n_connections >= found.n_ports >= 3, found
    assert found.n_keys > 100
    print("met", found)
