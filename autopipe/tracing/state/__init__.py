"""What a model's code may read and change beside its arguments: told apart, copied, put back.

- Copied and put back: ``state`` (the whole), ``reach`` (finds what code may change), ``cells``,
  ``iterators``, ``tensor_classes`` (kinds of places), ``quick_check`` (nothing has changed),
  ``mode_writes`` (weights that a change of mode writes to).
- Noticed when it changes: ``readers``, ``whole_layers`` (what stays whole); the names that code has for it:
  ``global_names``, ``loads``, ``namespaces``, ``global_hooks``.
- Data to run on: ``example_data`` (device, copies, equality), ``redraw`` (other data of the same kind),
  ``fills`` (values that mask others out).
- ``garbage``: less garbage collection while a model is recorded.
"""
