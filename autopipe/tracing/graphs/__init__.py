"""Graphs made of recordings. Which sizes they hold for is left to ``sizes``."""
