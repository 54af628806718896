"""What other libraries are to a pipeline: each has a module here, and is imported when that is used.

Planning and training without them is left to the rooms above.
"""
