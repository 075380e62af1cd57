"""The app behind a real uvicorn on loopback, in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fake_frontend import FakeFrontend

from jaxserve.server.app import create_app
from jaxserve.server.options import ServerOptions
from jaxserve.server.run import DrainingServer


@contextmanager
def running_server(frontend: FakeFrontend, options: ServerOptions) -> Iterator[str]:
    """Serves in a thread; yields http://host:port."""
    app = create_app(frontend, options)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_level="error",
        root_path=options.root_path,
        timeout_graceful_shutdown=2,
    )
    server = DrainingServer(config, app.state.serving)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
