"""`atoll serve store`: runs the store for services that are started by hand."""

import argparse
import signal
import sys
from pathlib import Path

from atoll.config.errors import ConfigError
from atoll.config.load import access_token
from atoll.runtime.errors import AtollError
from atoll.runtime.store import run_embedded_server


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="atoll serve store")
    parser.add_argument("--folder", type=Path, required=True, help="where it keeps its data: runs/NAME/store")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    where = f"{arguments.host}:{arguments.port}"
    try:
        with run_embedded_server(
            arguments.folder, (arguments.host, arguments.port), access_token()
        ) as server:
            print(f"store: redis://:$ATOLL_TOKEN@{where}/0", flush=True)
            sys.exit(f"store: its server ended with exit code {server.process.wait()}")
    except (AtollError, ConfigError) as error:
        sys.exit(f"store: {error}")


if __name__ == "__main__":
    main()
