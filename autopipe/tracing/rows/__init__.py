"""Whether rows of a batch meet, found by running a recording on others; what must run on all of them.

A step cuts a batch into microbatches, which is right only where each row's result is its own. ``analysis``
is the entry: it asks everything of a capture, and the rest answers.

- The question itself: ``mixing`` puts rows in others' places and names the op that mixes them; ``results``
  compares what comes out, ``row_questions`` asks again under other conditions; ``joining`` tells how whole
  numbers of pieces make those of a batch.
- Conditions that may hide it: other data (``varied_data``, ``data_dependent``, ``inner_numbers``,
  ``lifted``, ``tables``, ``class_weights``), another order (``order``), pieces of a batch (``pieces``),
  rows all unlike (``unlike_rows``), one row (``one_row``), other numbers of rows (``thresholds``,
  ``code_run``, ``among_many``; ``affordable`` says how many may be run, ``alike_layers`` ask one for all),
  random draws (``noise``, ``noise_of_others``, which also tells what all rows share).
- What no data tell: ``uneven_totals`` (losses over the weights of rows, followed by what is done).
- In the backward alone: ``backwards`` (functions and hooks that are not torch's), ``held_back`` (detached).
- Between modes and forms: ``by_mode``, ``other_answers``.
- From call to call: ``per_call_state`` (counters, running averages).
- What follows: ``tail``, the ops that run once on the whole batch.
"""
