"""What is kept and what is lost: damages, faults, restarts, large models, saves; ``__main__`` runs them."""
