"""An MCP server with a tool that grades: 1 / (1 + distance) to the ground truth, 0 for what is no number.

Each call is a line on stdout.
"""

from listening import serve
from mcp.server import MCPServer

server = MCPServer("distance")


@server.tool()
def distance(response: str, ground_truth: str) -> float:
    print("graded", flush=True)
    if not response.isdecimal():
        return 0.0
    return 1 / (1 + abs(int(response) - int(ground_truth)))


if __name__ == "__main__":
    serve(server.streamable_http_app())
