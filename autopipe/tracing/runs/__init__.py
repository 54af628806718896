"""A model run for a capture, plainly and recorded, in both modes, and what its recordings stand on.

``session`` is the entry: it records in both modes and decides what to record again; ``runs`` makes one run,
on the meta device with ``meta_kernels``.

- What a run depends on: ``assumptions`` (state it may have read), ``settings`` (grad mode, layouts),
  ``size_attributes``, ``hidden_sizes``.
- What a run leaves to the next: ``repeats``.
- Whether another recording is needed: ``same_in_eval`` (for evaluation), ``other_numbers`` (for other
  numbers in the inputs).
"""
