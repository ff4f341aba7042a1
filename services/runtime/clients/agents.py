"""The client of a process that runs agent functions."""

from atoll.runtime.clients.base import CEILING_S, Caller, Client
from atoll.wire.codec.agents import decode_agent_outcome, decode_agents_info, encode_agent_task
from atoll.wire.codec.gateway import encode_session_id
from atoll.wire.info import AgentsInfo
from atoll.wire.types import AgentOutcome, AgentTask, SessionId
from atoll.wire.v1 import agents_pb2, agents_pb2_grpc


class AgentsClient(Client):
    def __init__(self, address: str, caller: Caller, timeout_s: float = 10.0) -> None:
        super().__init__(address, caller, timeout_s)
        self._stub: agents_pb2_grpc.AgentsAsyncStub = agents_pb2_grpc.AgentsStub(self._channel)

    async def run(self, task: AgentTask, timeout_s: float = CEILING_S) -> AgentOutcome:
        """Returns when the task's function has ended; joins it if it runs, and for some minutes after its end
        gets the same answer. Raises UserError if the process does not run the agent."""
        return await self._query(self._stub.Run, encode_agent_task(task), decode_agent_outcome, timeout_s)

    async def cancel(self, session: SessionId) -> None:
        """The session's function gets CancelledError, and its `run` returns within seconds. Nothing happens
        if it does not run."""
        await self._call(self._stub.Cancel, agents_pb2.CancelAgentRequest(session=encode_session_id(session)))

    async def info(self) -> AgentsInfo:
        return await self._query(self._stub.Info, agents_pb2.AgentsInfoRequest(), decode_agents_info)
