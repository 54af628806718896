"""The model's own Python: where it is, which modules and functions stay whole, what it tells and keeps."""
