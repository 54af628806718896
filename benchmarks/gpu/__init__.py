"""Everything that needs a GPU, run and written down by one command; the same small on the simulated one."""
