"""Rewards of NeMo-Gym resources servers.

Each item is one session: `POST /seed_session`, then `POST /verify` with the cookies that it set. What
is verified is a request and an answer of OpenAI's Responses API, `{"responses_create_params", "response"}`,
and the fields of the server's own rows, such as `expected_answer`; the answer repeats them and adds `reward`.
"""

import json
import time
from collections.abc import Sequence

import httpx2
from pydantic import TypeAdapter

from atoll.external.base import Json
from atoll.external.channel import Channel
from atoll.external.probes import probe_reward
from atoll.external.responses import (
    Number,
    OptionsModel,
    RefusedError,
    ResponseModel,
    grade_each,
    parse_options,
)
from atoll.wire.types import ExternalServer, Graded, ScoreItem, Verdict


class NemoGymOptions(OptionsModel):
    ground_truth: str = "expected_answer"  # the field of the server's rows that holds an item's ground truth


class _Seeded(ResponseModel):
    pass


class _Verified(ResponseModel):
    reward: Number


_OPTIONS = TypeAdapter(NemoGymOptions)
_SEEDED = TypeAdapter(_Seeded)
_VERIFIED = TypeAdapter(_Verified)


class NemoGymReward:
    path = "/verify"

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self.channel = Channel(server, token)
        self._ground_truth = parse_options(server, _OPTIONS).ground_truth

    async def probe(self) -> str:
        """A server's rows may need fields that the probe lacks: rejecting it for that counts as an answer."""
        try:
            return await probe_reward(self)
        except RefusedError as refused:
            return f"verifies, but not the probe: {refused}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        return await grade_each(self.server, items, self._verify)

    async def close(self) -> None:
        await self.channel.close()

    async def _verify(self, item: ScoreItem) -> Verdict:
        cookies = httpx2.Cookies()
        row = {name: _parse_nested(value) for name, value in item.extra.items()}
        row[self._ground_truth] = item.ground_truth
        row["responses_create_params"] = {"input": [{"role": "user", "content": item.prompt}]}
        await self.channel.post("/seed_session", row, _SEEDED, cookies)
        row["response"] = _response(item)
        answer = await self.channel.post(self.path, row, _VERIFIED, cookies)
        return Graded(item.id, answer.reward, {})


def _parse_nested(text: str) -> Json:
    """Items hold text: objects and lists of a dataset row were encoded as JSON."""
    if not text.startswith(("{", "[")):
        return text
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return value


def _response(item: ScoreItem) -> Json:
    message: Json = {
        "id": f"msg_{item.id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": item.response, "annotations": []}],
    }
    return {
        "id": f"resp_{item.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
