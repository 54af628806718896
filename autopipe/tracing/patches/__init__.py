"""What is patched in torch and Python while a model is being recorded, and put back afterwards."""
