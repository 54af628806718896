"""Measurements behind the claims of the README, one runnable folder for each."""
