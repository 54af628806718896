"""Which sizes a recording holds for. Recording it is left to ``record``.

``explore`` is the entry: it tries other sizes by ``trials``, which run the recording by ``rerun``; ``dims``
proposes sizes and fits formulas to what is seen; ``variation`` is the result.

- What Python asked about sizes: ``guards`` (kept as checks), ``harmless`` (either answer is right),
  ``unproven`` (data may decide), ``expected`` (checked before a run).
- Sizes written as formulas of the inputs: ``lengths``, ``formulas``.
- Other examples: ``smaller_examples`` (faster to record), ``other_masks`` (masks and labels).
"""
