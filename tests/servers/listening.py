"""Serves an ASGI application on any free port of loopback, which is the first line on stdout."""

import socket
from typing import Any

import uvicorn


def serve(application: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listener])
