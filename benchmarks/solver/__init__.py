"""How good and how fast the solver is: published instances, synthetic families, hand-made splits."""
