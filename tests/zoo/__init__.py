"""Hand-written models in the styles that people bring, and how two observations of one are compared."""
