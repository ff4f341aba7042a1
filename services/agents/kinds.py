"""The function that runs an agent's sessions, of any kind."""

from atoll.agents.command import command_agent
from atoll.agents.environment_loop import environment_loop
from atoll.agents.http_agent import http_agent
from atoll.agents.runner import AgentFunction
from atoll.agents.server_clients import ServerClients
from atoll.agents.tool_loop import tool_loop
from atoll.config import functions
from atoll.config.schema import AgentConfig, SandboxConfig


def agent_function(
    agent: AgentConfig, sandbox: SandboxConfig | None, clients: ServerClients
) -> AgentFunction:
    """Raises ConfigError if it cannot be loaded."""
    if agent.tools:
        return tool_loop(agent.tools, sandbox or SandboxConfig(), clients)
    if agent.environment:
        return environment_loop(agent.environment, clients)
    if agent.http:
        return http_agent(agent.http)
    if agent.command:
        return command_agent(agent.command)
    function: AgentFunction = functions.load_user_function(agent.function, is_async=True)
    return function
