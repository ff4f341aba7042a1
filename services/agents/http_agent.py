"""An agent that runs elsewhere: a session is one POST of its task, answered when the agent has finished.

{"id": ..., "messages": [...], "ground_truth": ..., "data_source": ..., "extra": {...}, "model": ...,
 "base_url": ..., "anthropic_url": ..., "api_key": ...}      ->      {"reward": 1.0} or {}
"""

import asyncio
from typing import Annotated, Final

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from atoll.agents.runner import AgentFunction
from atoll.agents.session import AgentSession
from atoll.config.load import secret
from atoll.config.schema import HttpAgentConfig

CONNECT_TIMEOUT_S: Final = 10.0
BUSY: Final = (429, 503)  # statuses
BUSY_S: Final = 1.0  # before a busy agent is asked again, unless it says when; doubles each time
MAX_BUSY_S: Final = 30.0
MAX_EXCERPT: Final = 200  # characters of an answer, in an error


class _Answer(BaseModel):
    reward: FiniteFloat | None = None
    environment: Annotated[dict[str, str], Field(default_factory=dict)]  # for graders, such as files


def http_agent(settings: HttpAgentConfig) -> AgentFunction:
    """Raises ConfigError if the variable of its token is not set."""
    headers = {"authorization": f"Bearer {secret(settings.auth)}"} if settings.auth else {}

    async def play(session: AgentSession) -> float | None:
        """Waits as long as the session may take; a busy agent (429, or 503) is asked again later."""
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, headers=headers) as client:
            pause_s = BUSY_S
            while (response := await client.post(settings.url, json=_task(session))).status_code in (
                429,
                503,
            ):
                said = response.headers.get("retry-after", "")
                await asyncio.sleep(float(said) if said.isdecimal() else pause_s)
                pause_s = min(2 * pause_s, MAX_BUSY_S)
        if response.status_code != 200:
            raise RuntimeError(
                f"{settings.url}: got status {response.status_code} and {response.text[:MAX_EXCERPT]!r}, "
                "expected 200"
            )
        try:
            answer = _Answer.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(
                f"{settings.url}: {'.'.join(map(str, first['loc']))}: {first['msg']}; got "
                f'{response.text[:MAX_EXCERPT]!r}, expected {{"reward": NUMBER}} or {{}}'
            ) from None
        session.environment.update(answer.environment)
        return answer.reward

    return play


def _task(session: AgentSession) -> dict[str, object]:
    return {
        "id": session.id,
        "messages": session.messages,
        "ground_truth": session.ground_truth,
        "data_source": session.data_source,
        "extra": session.extra,
        "model": session.model,
        "base_url": session.base_url,
        "anthropic_url": session.anthropic_url,
        "api_key": session.api_key,
    }
