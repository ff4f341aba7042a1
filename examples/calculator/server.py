"""An MCP server with one tool, `add`: `python examples/calculator/server.py [PORT]`."""

import sys

from mcp.server import MCPServer

PORT = 8901

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
    server.run("streamable-http", host="127.0.0.1", port=port)
