"""A model run for a capture, plainly and recorded, in both modes, and what its recordings stand on."""
