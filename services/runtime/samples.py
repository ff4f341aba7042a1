"""Reads the samples that a run has kept: `atoll.read_samples`.

Letters in shapes: T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from atoll.config.load import read_json
from atoll.runtime.dump import DUMPS, answered_sets, answers_folder, dumps_by_step, read_dump
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import as_template_message, load_tokenizer
from atoll.wire.types import BELOW_PROMPT, Group, Int32, Node, Trajectory

Decode = Callable[[Int32], str]


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One answer of the policy within a sample."""

    context: str  # inserted before it, with the template's tokens: a tool's output, an agent's messages
    response: str
    after: int | None  # number of the turn that it continues; None: the prompt, or a new conversation
    finish_reason: str  # "stop", "length" or "abort"
    versions: tuple[int, ...]  # policy versions that produced its tokens, ascending
    num_tokens: int  # produced by the policy
    reward: float  # for this turn alone; part of the sample's score
    trained: bool  # False: kept without weight in the loss


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, the policy's answer and its reward, as a step trained on it or a validation measured it."""

    step: int
    set: str | None  # validation set; None: of training
    group: str  # RUN/EPOCH/PROMPT; of a validation RUN/val/SET/VERSION/PROMPT
    index: int  # within the group
    data_source: str
    prompt: str  # the row as the chat template renders it
    response: str  # that was graded: the last one of a dialogue
    ground_truth: str
    score: float
    components: Mapping[str, float]  # by grader
    reasons: Mapping[str, str]  # by grader, if it gave one
    versions: tuple[int, ...]  # policy versions that produced its tokens, ascending
    num_prompt_tokens: int  # 0 if an agent gets the row
    num_tokens: int  # produced by the policy
    finish_reason: str  # of the last turn: "stop", "length" or "abort"
    status: str  # "completed", "truncated" or "aborted"
    reason: str  # why it ended, if the turns do not say so
    is_baseline: bool  # greedy, scored and not trained on
    turns: tuple[SampleTurn, ...]
    messages: tuple[Mapping[str, Any], ...]  # of a dialogue, as chat APIs have them; () of a single turn
    extra: Mapping[str, str]  # of the row

    @property
    def id(self) -> str:
        return f"{self.group}/{self.index}"


def read_samples(folder: Path | str, step: int | None = None, set: str | None = None) -> list[Sample]:
    """The samples of one step of the run in `folder`, in the order of its batch; with `set`, the answers to
    that validation set after the step. By default of the last step that has any.

    Raises UserError if there are none; it says which there are.
    """
    folder = Path(folder)
    config = _read_config(folder)
    number, groups = read_dump(_find(folder, config, step, set))
    decode = _TokenTexts(Path(config["model"]["path"]))
    return [
        _sample(number, group, trajectory, decode)
        for group in groups
        for trajectory in (*group.samples, *([group.baseline] if group.baseline else []))
    ]


def _find(folder: Path, config: Mapping[str, Any], step: int | None, name: str | None) -> Path:
    found = dumps_by_step(folder / DUMPS if name is None else answers_folder(folder / DUMPS, name))
    if not found and name is not None and (sets := answered_sets(folder / DUMPS)):
        raise UserError(
            f"{folder}: no answers to a validation set {name!r}, expected one of {', '.join(sets)}"
        )
    if not found:
        what = "samples" if name is None else "answers to validation sets"
        raise UserError(f"{folder} holds no {what}: {_why_none(config)}")
    if step is None:
        return found[max(found)]
    if step not in found:
        raise UserError(
            f"{folder}: no samples of step {step}, expected one of {_spans(list(found))}; "
            'coordinator.dump = "all" keeps those of all steps'
        )
    return found[step]


def _why_none(config: Mapping[str, Any]) -> str:
    if config["run"]["mode"] == "supervised":
        return "a supervised run generates none"
    if config["coordinator"]["dump"] in ("none", False):  # a switch in the runs of earlier versions
        return 'it ran with coordinator.dump = "none"; set that to "recent" or "all"'
    return "none are finished yet"


def _spans(steps: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    cuts = [0, *(i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1), len(steps)]
    spans = [(steps[first], steps[end - 1]) for first, end in pairwise(cuts)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _sample(step: int, group: Group, trajectory: Trajectory, decode: Decode) -> Sample:
    components: dict[str, float] = {}
    for reward in trajectory.rewards:
        for name, value in reward.components.items():
            components[name] = components.get(name, 0.0) + value
    prompt = group.prompt
    return Sample(
        step=step,
        set=prompt.id.validation_set,
        group=str(prompt.id),
        index=trajectory.id.index,
        data_source=prompt.data_source,
        prompt=prompt.text,
        response=trajectory.response,
        ground_truth=prompt.ground_truth,
        score=trajectory.score,
        components=components,
        reasons={name: reason for reward in trajectory.rewards for name, reason in reward.reasons.items()},
        versions=_versions(*trajectory.nodes),
        num_prompt_tokens=len(prompt.token_ids),
        num_tokens=trajectory.num_produced,
        finish_reason=trajectory.finish_reason.value,
        status=trajectory.status.value,
        reason=trajectory.reason,
        is_baseline=trajectory is group.baseline,
        turns=_turns(trajectory, decode),
        messages=tuple(map(as_template_message, trajectory.messages)),
        extra=dict(prompt.extra),
    )


def _turns(trajectory: Trajectory, decode: Decode) -> tuple[SampleTurn, ...]:
    nodes, untrained = trajectory.nodes, trajectory.untrained_nodes()
    number_of = {turn.node: number for number, turn in enumerate(trajectory.turns)}
    turns = []
    for turn in trajectory.turns:
        above, inserted = nodes[turn.node].parent, []
        while above > BELOW_PROMPT and above not in number_of:
            inserted.append(nodes[above].token_ids)
            above = nodes[above].parent
        turns.append(
            SampleTurn(
                context=decode(np.concatenate(inserted[::-1])) if inserted else "",
                response=turn.text,
                after=number_of.get(above),
                finish_reason=turn.finish_reason.value,
                versions=_versions(nodes[turn.node]),
                num_tokens=nodes[turn.node].num_produced,
                reward=sum((r.value for r in trajectory.rewards if r.node == turn.node), 0.0),
                trained=turn.node not in untrained,
            )
        )
    return tuple(turns)


def _versions(*nodes: Node) -> tuple[int, ...]:
    return tuple(
        sorted({span.version.number for node in nodes for span in node.spans if span.end > span.start})
    )


class _TokenTexts:
    """Texts of what was inserted between turns, of which a dump has the token ids alone."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __call__(self, token_ids_T: Int32) -> str:
        return str(self._tokenizer.decode(token_ids_T.tolist(), skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not self._model.exists():
            raise UserError(
                f"{self._model}: missing; its tokenizer decodes what samples of several turns contain: call "
                "this in the directory in which the run was started"
            )
        return load_tokenizer(self._model)


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Not validated: it may name a grader's file that is gone, or be of an earlier version."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} contains no run: give a run's folder, such as runs/NAME")
    return read_json(path)
