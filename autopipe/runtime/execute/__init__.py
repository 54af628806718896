"""A step as one rank runs it: its actions and messages as a list, and what goes through that list.

Which order is right is left to ``schedule``, what an action does to ``stage``.
"""
