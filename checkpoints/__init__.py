"""Weights on disk to arrays and back. Part of jaxserve: import jaxserve, not this package."""
