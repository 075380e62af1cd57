"""Benchmarks: one file per question, each a function that returns a Report. Nothing here starts a server or prints."""
