"""What a recording is made of. Making one is left to ``record``.

- A recording: ``call`` (a node), ``regions`` (grad mode, autocast and hooks around it), ``module_modes`` (a
  module in another mode), ``lifting`` (functions that hold tensors), ``memory`` (what calls write into).
- Running it: ``perform``, ``places`` (where values lie that calls take as they run again); code for it:
  ``named``; words for it: ``describe``; which errors are a model's: ``faults``.
- Knowledge about torch: ``functions`` (what each does), ``streams`` (which draw random numbers), ``labels``
  (losses that average over labels), ``derivatives`` (what those that a forward takes hang on).
- What is alike: ``kinds`` (modules), ``likeness`` (recordings), ``sharing`` (leaves that run once for all).
"""
