"""Matrix products with a packed weight. reference.py defines the result."""
