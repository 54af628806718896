"""The model's own Python: where it is, which modules and functions stay whole, what it tells and keeps.

- What stays whole, as one op: ``leaves`` (modules), ``opaque`` (functions), ``statements`` (of the root's
  forward), ``standins`` (what such code takes of open modules).
- What a leaf keeps or is given from outside: ``leaf_state``, ``leaf_setters``, ``attributes``,
  ``set_first``.
- Where code is, what it calls and what it reads of that: ``position``, ``callees``, ``reading``,
  ``own_code``, ``scripted``.
- Code that only checks or tells people: ``checks``, ``messages``, ``kept``.
- ``restart``: reasons to record once more.
"""
