"""One stage a rank: first answers along orders of the items, and every chain under a bound.

Several stages a rank are left to ``ranks``.
"""
