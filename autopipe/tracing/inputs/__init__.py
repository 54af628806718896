"""A call's arguments. What may change between two calls is left to ``sizes``.

- Taken apart and put together: ``arguments`` (bound to the model's signature and checked), ``structure``
  (nested values as leaves), ``contents`` (compared), ``names``.
- What they hold: ``packing`` (rows of several samples in one axis), ``layout`` (order of axes in memory),
  ``free_numbers`` (plain numbers that vary), ``held_numbers`` (those in attributes), ``caches`` (left out).
- Written to by a forward: ``mutable`` (found), ``writes`` (repeated for the caller).
- ``examples``: example inputs that a model provides itself.
"""
