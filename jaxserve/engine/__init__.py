"""What runs one step of the model and chooses the tokens."""
