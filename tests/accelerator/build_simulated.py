"""Builds the simulated accelerator, where that was not done before, and loads it."""

import simulated

assert simulated.native.device_count()
