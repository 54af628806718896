"""Holds a capture against its model on data that neither was recorded with."""
