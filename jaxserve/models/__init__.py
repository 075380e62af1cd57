"""Model families: one file each, found through the registry."""
