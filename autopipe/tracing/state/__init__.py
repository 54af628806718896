"""What a model's code may read and change beside its arguments: told apart, copied, put back."""
