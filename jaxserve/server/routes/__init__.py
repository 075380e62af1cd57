"""One file per group of endpoints; each defines `router`."""
