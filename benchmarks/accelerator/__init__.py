"""What the host and the wire do in a step on an accelerator, seen on the simulated one."""
