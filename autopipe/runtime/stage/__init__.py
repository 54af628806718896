"""One stage at work: put on its device, forward, backward whole or in parts, and the loss at its end.

When each action runs is left to ``execute``.
"""
