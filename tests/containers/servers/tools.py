"""An MCP server with a tool that adds."""

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    return a + b


if __name__ == "__main__":
    security = TransportSecuritySettings(allowed_hosts=["tool-server:8000"])
    uvicorn.run(server.streamable_http_app(transport_security=security), host="0.0.0.0", port=8000)
