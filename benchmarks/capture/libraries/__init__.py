"""Models of other libraries, as their documentation builds them, small; walked by ``__main__``."""
