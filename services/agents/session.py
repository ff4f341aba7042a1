"""The argument of an agent function: a dataset row, and the policy behind a chat API.

async def agent(session: AgentSession) -> float:
    answer = await session.client.chat.completions.create(model=session.model, messages=session.messages)
    return float(answer.choices[0].message.content == session.ground_truth)
"""

import math
import secrets
from functools import cached_property
from typing import Any, Final

import openai

from atoll.wire.types import AgentTask, Message

MAX_RETRIES: Final = 8  # up to a minute, in which a gateway that died is started again
TIMEOUT_S: Final = 3600.0  # of a turn, which may wait for a replica and for a push
CONNECT_TIMEOUT_S: Final = 10.0


class EnvironmentFailedError(Exception):
    """Raise it if a tool or an environment broke down: its session ends as "environment failed", and
    `on_end.environment_failed` says what happens to it."""


class AgentSession:
    """One session: every answer that the policy gives in it is part of one sample."""

    def __init__(self, task: AgentTask) -> None:
        self.id = str(task.session)
        self.messages: list[dict[str, Any]] = [_chat_message(message) for message in task.messages]
        self.ground_truth = task.ground_truth
        self.data_source = task.data_source
        self.extra = dict(task.extra)
        self.base_url = f"{task.url}/v1"  # for OpenAI's clients
        self.anthropic_url = task.url  # for Anthropic's
        self.api_key = task.agent_key
        self.model = task.model
        self.reward_key = task.reward_key  # for a judge or an environment, never for the agent
        self.environment: dict[str, str] = {}  # texts for graders, such as files by path

    def __repr__(self) -> str:
        return f"AgentSession({self.id!r}, model={self.model!r}, base_url={self.base_url!r})"

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """Closed when the function has ended."""
        return openai.AsyncOpenAI(
            api_key=self.api_key,
            base_url=self.base_url,
            max_retries=MAX_RETRIES,
            timeout=openai.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            # no proxy of the environment, which would see the key
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def reward(self, value: float, turn: str | None = None) -> None:
        """Adds a reward for the answer with the id `turn`, or for the whole session.

        Raises ValueError if it is not finite, openai.APIStatusError if the gateway refuses it.
        """
        if not math.isfinite(value):
            raise ValueError(f"session.reward: got {value}, expected a finite number")
        client = self.client.copy(api_key=self.reward_key, base_url=self.anthropic_url)
        await client.post(
            "/sessions/reward",
            cast_to=object,
            body={"value": float(value), "turn": turn},
            # equal in all tries of this call
            options={"headers": {"idempotency-key": secrets.token_hex(8)}},
        )

    async def aclose(self) -> None:
        if "client" in vars(self):
            await self.client.close()


def _chat_message(message: Message) -> dict[str, Any]:
    """As OpenAI's chat API has it."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    return chat
