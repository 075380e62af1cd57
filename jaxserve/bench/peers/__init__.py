"""jaxserve beside other engines on the same file: one process for each, measured in turns by `bench_peers`."""
