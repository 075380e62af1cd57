"""Kernels: arrays in, arrays out. Part of jaxserve: import jaxserve, not this package."""
