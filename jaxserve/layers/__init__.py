"""Blocks that model families share: pure functions on arrays."""
