"""Agent tasks and their outcomes <-> messages. Pure."""

from atoll.wire.codec.fleet import decode_server, encode_server
from atoll.wire.codec.gateway import decode_session_id, encode_session_id
from atoll.wire.codec.rewards import decode_message, encode_message
from atoll.wire.info import AgentsInfo
from atoll.wire.types import AgentOutcome, AgentTask, ServerAccess
from atoll.wire.v1 import agents_pb2


def encode_agent_task(task: AgentTask) -> agents_pb2.RunAgentRequest:
    return agents_pb2.RunAgentRequest(
        session=encode_session_id(task.session),
        agent=task.agent,
        url=task.url,
        agent_key=task.agent_key,
        reward_key=task.reward_key,
        model=task.model,
        messages=map(encode_message, task.messages),
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        extra=task.extra,
        servers=[
            agents_pb2.ServerAccess(server=encode_server(access.server), token=access.token)
            for access in task.servers
        ],
    )


def decode_agent_task(message: agents_pb2.RunAgentRequest) -> AgentTask:
    return AgentTask(
        session=decode_session_id(message.session),
        agent=message.agent,
        url=message.url,
        agent_key=message.agent_key,
        reward_key=message.reward_key,
        model=message.model,
        messages=tuple(map(decode_message, message.messages)),
        ground_truth=message.ground_truth,
        data_source=message.data_source,
        extra=dict(message.extra),
        servers=tuple(
            ServerAccess(decode_server(access.server), access.token if access.HasField("token") else None)
            for access in message.servers
        ),
    )


def encode_agent_outcome(outcome: AgentOutcome) -> agents_pb2.RunAgentReply:
    return agents_pb2.RunAgentReply(
        cause=outcome.cause,
        reward=outcome.reward,
        environment_failed=outcome.environment_failed,
        environment=outcome.environment,
    )


def decode_agent_outcome(message: agents_pb2.RunAgentReply) -> AgentOutcome:
    reward = message.reward if message.HasField("reward") else None
    return AgentOutcome(message.cause, reward, message.environment_failed, dict(message.environment))


def encode_agents_info(info: AgentsInfo) -> agents_pb2.AgentsInfoReply:
    return agents_pb2.AgentsInfoReply(concurrency=info.concurrency, running=info.running)


def decode_agents_info(message: agents_pb2.AgentsInfoReply) -> AgentsInfo:
    return AgentsInfo(dict(message.concurrency), message.running)
