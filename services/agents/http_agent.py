"""An agent that runs elsewhere: a session is one POST of its task, answered when the agent has finished.

{"id": ..., "messages": [...], "ground_truth": ..., "data_source": ..., "extra": {...}, "model": ...,
 "base_url": ..., "anthropic_url": ..., "api_key": ...}      ->      {"reward": 1.0} or {}
"""

import asyncio
import logging
from typing import Annotated, Final

import httpx2
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from atoll.agents.runner import AgentFunction
from atoll.agents.session import AgentSession, tls_context
from atoll.config.load import secret
from atoll.config.schema import HttpAgentConfig

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
BUSY: Final = (429, 503)  # statuses
PAUSES_S: Final = (0.5, 1, 2, 4, 8, 15, 30, 30, 30)  # before a busy agent is asked again, unless it says when
MAX_EXCERPT: Final = 200  # characters of an answer, in an error


class _Answer(BaseModel):
    reward: FiniteFloat | None = None
    environment: Annotated[dict[str, str], Field(default_factory=dict)]  # for graders, such as files


def http_agent(settings: HttpAgentConfig) -> AgentFunction:
    """Raises ConfigError if the variable of its token is not set."""
    headers = {"authorization": f"Bearer {secret(settings.auth)}"} if settings.auth else {}

    async def play(session: AgentSession) -> float | None:
        """Waits as long as the session may take. One that is busy or not there is asked again, for about two
        minutes."""
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with httpx2.AsyncClient(
            timeout=timeout, trust_env=False, verify=tls_context(), headers=headers
        ) as client:
            response = await _post(client, settings.url, _task(session))
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


async def _post(client: httpx2.AsyncClient, url: str, task: dict[str, object]) -> httpx2.Response:
    for pause_s in PAUSES_S:
        try:
            response = await client.post(url, json=task)
        except httpx2.ConnectError:  # it has not heard of the session
            log.warning("no agent answers at %s: trying again in %g s", url, pause_s)
        else:
            if response.status_code not in BUSY:
                return response
            said = response.headers.get("retry-after", "")
            pause_s = float(said) if said.isdecimal() else pause_s
        await asyncio.sleep(pause_s)
    return await client.post(url, json=task)


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
