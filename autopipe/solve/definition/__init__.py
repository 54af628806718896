"""What a stage of a problem costs: the one definition that every solver, bound and test is held against.

Making problems from graphs is left to ``making``, solving them to ``lines`` and ``ranks``.
"""
