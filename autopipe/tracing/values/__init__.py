"""What a recording knows of values: the call behind each tensor and number, what Python went by of them."""
