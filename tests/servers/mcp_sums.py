"""An MCP server with tools that add, and that fail once. Arguments: port (0: any), folder of its faults."""

import sys
from pathlib import Path

from faults import misbehave
from listening import serve
from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def fail_once(how: str) -> str:
    await misbehave(Path(sys.argv[2]), how)
    return "well again"


if __name__ == "__main__":
    serve(server.streamable_http_app(), int(sys.argv[1]))
