"""Serves an ASGI application on a port of loopback (0: any free one), which is the first line on stdout."""

import socket
from typing import Any

import uvicorn


def serve(application: Any, port: int = 0) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listener])
