"""Logical axes, meshes and sharding plans. Part of jaxserve: import jaxserve, not this package."""
