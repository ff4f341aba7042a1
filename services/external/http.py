"""Reward models over HTTP and JSON, in common formats, chosen by option `preset`.

- "plain": ours. One request for all items, `{"items": [{"id", "prompt", "response", "ground_truth",
  "data_source", "finish_reason", "response_length", "extra"}]}`; the answer has one verdict per item, in
  their order: `{"verdicts": [{"value", "components"?, "reason"?} | {"error", "retryable"?}]}`.
- "slime": that of slime's `--rm-type remote_rm --rm-url`. One request per item,
  `{"prompt", "response", "label"}`, answered by a number, or by an object that holds it under `reward_key`
  (slime's `--reward-key`; without one "reward" or "score").
- "openrlhf": that of OpenRLHF's `--remote_rm_url`, as its `serve_rm` answers. One request for all items,
  `{"query": [prompt + response], "prompts": [...], "labels": [...]}`, answered by
  `{"rewards": [...], "scores": [...], "extra_logs": {NAME: [...]}}`; older ones answer with `rewards` only.
- "sglang": a reward model that SGLang serves with `--is-embedding`. `POST /classify {"text": [...]}`,
  answered by `[{"embedding": [score], "meta_info": {...}}]`. (`/v1/classify` is of no use: with
  one label its softmax is always 1.)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from atoll.external.base import Json, item_fields
from atoll.external.channel import Channel
from atoll.external.probes import probe_reward
from atoll.external.responses import (
    Number,
    OptionsModel,
    ResponseModel,
    excerpt,
    grade_each,
    number_field,
    parse_options,
    sanitize,
)
from atoll.runtime.errors import ProtocolError
from atoll.wire.types import ExternalServer, Graded, GradingError, ScoreItem, Verdict


class HttpReward:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self.channel = Channel(server, token)
        self._preset = parse_options(server, _PRESETS, preset="plain")
        self.path = self._preset.path

    async def probe(self) -> str:
        return f"preset {self._preset.preset}: {await probe_reward(self)}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        return await self._preset.score(self.channel, items)

    async def close(self) -> None:
        await self.channel.close()


class _Strict(ResponseModel):
    model_config = ConfigDict(extra="forbid")


class _Reward(_Strict):
    id: str | None = None
    value: Number
    components: dict[str, Number] = Field(default_factory=dict)
    reason: str = ""


class _FailedVerdict(_Strict):
    id: str | None = None
    error: str
    retryable: bool = False


class _Verdicts(ResponseModel):
    verdicts: list[_Reward | _FailedVerdict]


class _Preset(OptionsModel):
    path: ClassVar[str] = ""  # after the registered URL


class Plain(_Preset):
    preset: Literal["plain"]

    async def score(self, channel: Channel, items: Sequence[ScoreItem]) -> list[Verdict]:
        answer = await channel.post(self.path, {"items": [_plain_item(item) for item in items]}, _VERDICTS)
        _check_number(channel, "verdicts", len(answer.verdicts), len(items))
        return [
            self._verdict(channel, item, verdict)
            for item, verdict in zip(items, answer.verdicts, strict=True)
        ]

    @staticmethod
    def _verdict(channel: Channel, item: ScoreItem, verdict: _Reward | _FailedVerdict) -> Verdict:
        name = channel.server.name
        if verdict.id not in (None, str(item.id)):
            got = excerpt(verdict.id, channel.token)
            raise ProtocolError(f"{channel.where}: got a verdict of id {got}, expected {str(item.id)!r}")
        if isinstance(verdict, _FailedVerdict):
            return GradingError(item.id, name, sanitize(verdict.error, channel.token), verdict.retryable)
        reasons = {name: sanitize(verdict.reason, channel.token)} if verdict.reason else {}
        return Graded(item.id, verdict.value, verdict.components, reasons)


class Slime(_Preset):
    preset: Literal["slime"]
    reward_key: str = ""

    async def score(self, channel: Channel, items: Sequence[ScoreItem]) -> list[Verdict]:
        answer = number_field(self.reward_key) if self.reward_key else number_field("reward", "score")

        async def grade(item: ScoreItem) -> Verdict:
            body: Json = {"prompt": item.prompt, "response": item.response, "label": item.ground_truth}
            return Graded(item.id, await channel.post(self.path, body, answer), {})

        return await grade_each(channel.server, items, grade)


class _RewardList(ResponseModel):
    rewards: list[Number]
    extra_logs: dict[str, list[Number]] = Field(default_factory=dict)


class OpenRLHF(_Preset):
    preset: Literal["openrlhf"]

    async def score(self, channel: Channel, items: Sequence[ScoreItem]) -> list[Verdict]:
        body: Json = {
            "query": [item.prompt + item.response for item in items],
            "prompts": [item.prompt for item in items],
            "labels": [item.ground_truth for item in items],
        }
        answer = await channel.post(self.path, body, _REWARDS)
        for name, column in {"rewards": answer.rewards, **answer.extra_logs}.items():
            _check_number(channel, name, len(column), len(items))
        return [
            Graded(item.id, reward, {name: column[n] for name, column in answer.extra_logs.items()})
            for n, (item, reward) in enumerate(zip(items, answer.rewards, strict=True))
        ]


class _Classified(ResponseModel):
    embedding: Annotated[list[Number], Field(min_length=1, max_length=1)]  # a reward model has one label


class SGLang(_Preset):
    path: ClassVar[str] = "/classify"
    preset: Literal["sglang"]
    template: str = Field("{prompt}{response}", pattern=r"\{response\}")  # the text that the model reads

    async def score(self, channel: Channel, items: Sequence[ScoreItem]) -> list[Verdict]:
        texts: list[Json] = [
            _fill_template(self.template, {"{prompt}": item.prompt, "{response}": item.response})
            for item in items
        ]
        answer = await channel.post(self.path, {"text": texts}, _CLASSIFIED)
        _check_number(channel, "scores", len(answer), len(items))
        return [Graded(item.id, one.embedding[0], {}) for item, one in zip(items, answer, strict=True)]


def _fill_template(template: str, fields: Mapping[str, str]) -> str:
    """Braces within field values are kept."""
    return re.sub(r"\{(prompt|response)\}", lambda place: fields[place[0]], template)


def _plain_item(item: ScoreItem) -> Json:
    return {"id": str(item.id), **item_fields(item), "extra": dict(item.extra)}


def _check_number(channel: Channel, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise ProtocolError(f"{channel.where}: got {got} {what} for {expected} items, expected one for each")


_PRESETS: TypeAdapter[Plain | Slime | OpenRLHF | SGLang] = TypeAdapter(
    Annotated[Plain | Slime | OpenRLHF | SGLang, Field(discriminator="preset")]
)
_VERDICTS = TypeAdapter(_Verdicts)
_REWARDS = TypeAdapter(_RewardList)
_CLASSIFIED = TypeAdapter(list[_Classified])
