"""What ranks add up after the last backward: tied gradients, replicas' gradients, norms, overflows.

Carrying the bytes is left to ``wire``.
"""
