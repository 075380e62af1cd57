"""Matrix products with one of several weights for each row (experts). reference.py defines the result."""
