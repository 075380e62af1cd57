"""OpenAI-compatible HTTP server over a Frontend: `create_app` to build it, `run_server` to run it."""
