"""The agents' servicer: Run, Cancel and Info of package atoll.v1."""

import asyncio
from typing import Any, Self

import grpc.aio

from atoll.agents.kinds import agent_function
from atoll.agents.runner import AgentRunner, HostedAgent
from atoll.agents.server_clients import ServerClients
from atoll.config.load import withhold_tokens
from atoll.runtime.process import ServiceContext
from atoll.wire.codec.agents import decode_agent_task, encode_agent_outcome, encode_agents_info
from atoll.wire.codec.gateway import decode_session_id
from atoll.wire.info import AgentsInfo
from atoll.wire.v1 import agents_pb2, agents_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AgentsService(agents_pb2_grpc.AgentsServicer):
    def __init__(self, runner: AgentRunner, agents: dict[str, HostedAgent]) -> None:
        self._runner = runner
        self._agents = agents

    @classmethod
    async def build(cls, context: ServiceContext) -> Self:
        """Raises ConfigError if a function cannot be loaded or a command cannot be run."""
        withhold_tokens()
        clients, sandbox = ServerClients(), context.config.reward.sandbox
        agents = {
            agent.name: HostedAgent(agent_function(agent, sandbox, clients), agent.concurrency)
            for agent in context.config.agents
            if context.agent in ("", agent.name)
        }
        runner = AgentRunner(agents)
        runner.end_process_if_blocked()
        return cls(runner, agents)

    def add_to(self, server: grpc.aio.Server) -> None:
        agents_pb2_grpc.add_AgentsServicer_to_server(self, server)

    async def Run(self, request: agents_pb2.RunAgentRequest, context: Context) -> agents_pb2.RunAgentReply:
        return encode_agent_outcome(await self._runner.run(decode_agent_task(request)))

    async def Cancel(
        self, request: agents_pb2.CancelAgentRequest, context: Context
    ) -> agents_pb2.CancelAgentReply:
        self._runner.cancel(decode_session_id(request.session))
        return agents_pb2.CancelAgentReply()

    async def Info(
        self, request: agents_pb2.AgentsInfoRequest, context: Context
    ) -> agents_pb2.AgentsInfoReply:
        concurrency = {name: agent.concurrency for name, agent in self._agents.items()}
        return encode_agents_info(AgentsInfo(concurrency, self._runner.num_running))

    async def wait_for_failure(self) -> None:
        await asyncio.Event().wait()  # failures are outcomes of their sessions

    async def close(self) -> None:
        await self._runner.close()
