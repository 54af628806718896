"""Weights beyond a step: checkpoints, and the model made whole again on every rank.

Who trains which weight is left to ``stage``.
"""
