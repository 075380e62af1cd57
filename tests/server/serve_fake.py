"""Runs the real `run_server` with the fake frontend; the shutdown tests start this file as a process."""

import sys

from fake_frontend import FakeFrontend, Faults

from jaxserve.server.app import create_app
from jaxserve.server.options import ServerOptions
from jaxserve.server.run import run_server

if __name__ == "__main__":
    token_delay, drain_timeout = map(float, sys.argv[1:3])
    frontend = FakeFrontend(Faults(token_delay_seconds=token_delay))
    options = ServerOptions(port=0, drain_timeout_seconds=drain_timeout)
    code = run_server(create_app(frontend, options), frontend, options, startup_seconds=1.25)
    print("closed" if frontend.closed else "not closed", flush=True)
    raise SystemExit(code)
