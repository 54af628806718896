"""Bounds that no answer beats, and searches that close what is left.

Enumerating the chains under a bound is left to ``lines``.
"""
