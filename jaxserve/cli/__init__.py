"""The command line: one file per command, `main.run` as the entry point. The only place that reads the environment."""
