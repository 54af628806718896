"""Graphs made of recordings. Which sizes they hold for is left to ``sizes``.

- ``modes`` gives the forms of a model common names; ``emit`` makes fx graphs of them, ``opgraph`` the op
  graph, ``scope`` the modules that run generated code.
- ``questions`` tells which form a call's inputs ask for, ``left_numbers`` what it leaves in attributes.
"""
