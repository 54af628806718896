"""Whose the weights are: alike on all ranks at first, trained by one, brought back to all.

Moving them between steps is left to ``weight_moves``.
"""
