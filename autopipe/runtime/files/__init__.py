"""The files that a checkpoint may be, ours and those of torch: written whole, read in place, checked.

Which tensors go in, and into what they are read, is left to ``checkpoint``.
"""
