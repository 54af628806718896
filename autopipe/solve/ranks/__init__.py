"""Several stages a rank: exact where few downsets matter, first answers elsewhere.

One stage a rank is left to ``lines``.
"""
