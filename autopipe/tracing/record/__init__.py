"""One run of a model, recorded: what goes whole into it, what call by call.

``recorder`` is the entry; ``opaque_calls`` records code that stays whole, ``contexts`` what code is in
meanwhile.

- Writes that need care: ``bounded`` (parameters held within bounds), ``frozen`` (weights frozen for a
  while), ``replaced_buffers``, ``mode_switches``, ``dict_arguments``, ``exported_memory`` (memory given to
  numpy).
- Questions that need care: ``identity`` (``a is b``), ``split_guards`` (how many pieces), ``draws`` (random
  numbers), ``foreign`` (what other layers have and make), ``passed_on`` (containers that they fill).
"""
