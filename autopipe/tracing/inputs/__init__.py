"""A call's arguments. What may change between two calls is left to ``sizes``."""
