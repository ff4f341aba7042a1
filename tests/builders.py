"""Samples, groups and configs for tests: of the run "toy", with defaults for whatever a test leaves out.

group(sample(sample_id(7, 0), node([3, 4]), score=1.0), sample(sample_id(7, 1), node([5])))
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from atoll.config.load import validate, write_resolved
from atoll.config.mode_rules import UNREAD
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rollouts.generation import Generation
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.session_servers import SessionServers
from atoll.coordinator.summary import Outcome, complete_summary
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.model_spec import ModelSpec
from atoll.runtime.telemetry import MetricsFile
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import (
    BELOW_PROMPT,
    STATUS_AFTER,
    WHOLE,
    FinishReason,
    Group,
    GroupId,
    Node,
    Origin,
    Prompt,
    SampleId,
    Sampling,
    Trajectory,
    Turn,
    TurnId,
    TurnRequest,
    TurnReward,
    Version,
    VersionSpan,
)

V0 = Version("l", 0)
NO_GPUS: Sequence[int] = ()  # a machine that computes on the CPU
SAMPLING = Sampling(max_new_tokens=8)


def group_id(prompt: int = 0) -> GroupId:
    return GroupId("toy", 0, prompt)


def sample_id(prompt: int = 0, index: int = 0) -> SampleId:
    return SampleId(group_id(prompt), index)


def prompt(number: int = 0, ids: Sequence[int] = (1,)) -> Prompt:
    return Prompt(group_id(number), np.array(ids, np.int32), "1+1=", "2", "toy")


def node(
    ids: Sequence[int],
    mask: Sequence[int] | None = None,
    *,
    parent: int = BELOW_PROMPT,
    logprobs: float | Sequence[float] = -1.0,
    versions: Version | Sequence[Version] = V0,
) -> Node:
    """`mask`, `logprobs` and `versions` by token; the last two also one for all."""
    if isinstance(versions, Version):
        versions = [versions] * len(ids)
    mask = [1] * len(ids) if mask is None else mask
    spans = []
    for (version, produced), tokens in groupby(range(len(ids)), lambda i: (versions[i], mask[i])):
        first, *_, last = [*(numbers := list(tokens)), numbers[-1]]
        if produced:
            spans.append(VersionSpan(version, first, last + 1))
    return Node(
        parent,
        np.array(ids, np.int32),
        np.array(mask, np.bool_),
        np.broadcast_to(np.array(logprobs, np.float32), len(ids)).copy(),
        tuple(spans),
    )


def arrival(*samples: Trajectory) -> Arrival:
    """As they come over the wire."""
    return Arrival.parse(encode_payload(samples))


def sample(
    id: SampleId,
    *nodes: Node,
    score: float | None = None,
    rewards: tuple[TurnReward, ...] = (),
    attempt: int = 0,
    reason: FinishReason = FinishReason.STOP,
    text: str = "2",
    replica: str = "rollout-0",
) -> Trajectory:
    """Each node that has produced tokens is a turn; one of no tokens at all is one, too. `score`: one reward
    by `exact_match`, for the whole trajectory."""
    if score is not None:
        rewards = (TurnReward(WHOLE, score, {"exact_match": score}),)
    turns = tuple(
        Turn(number, reason, text, Origin(replica, "1"), 0.0, 1.0)
        for number, node in enumerate(nodes)
        if node.loss_mask.any() or not len(node.token_ids)
    )
    return Trajectory(id, attempt, nodes, turns, STATUS_AFTER[reason], rewards)


def turn_request(
    context: Sequence[int],
    *,
    group: GroupId | None = None,
    indices: Sequence[int] = (0,),
    attempt: int = 0,
    turn: int = 0,
    sampling: Sampling = SAMPLING,
    session: str = "",
) -> TurnRequest:
    """One turn of each sample of a group, all after the same context."""
    ids = tuple(TurnId(SampleId(group or group_id(), index), attempt, turn) for index in indices)
    return TurnRequest(ids, np.array(context, np.int32), sampling, session)


def group(*samples: Trajectory, ids: Sequence[int] = (1,), baseline: Trajectory | None = None) -> Group:
    """`ids`: the prompt's."""
    return Group(prompt(samples[0].id.group.prompt, ids), samples, baseline)


def pending(
    number: int, num_samples: int, sampling: Sampling = SAMPLING, *, has_baseline: bool = False
) -> PendingGroup:
    """A group of which nothing has been generated."""
    return PendingGroup(prompt(number), number, sampling, [None] * num_samples, 0, has_baseline)


Tree = Mapping[str, Any]


def generation_without_agents(replicas: Replicas, rewards: Rewards, **settings: Any) -> Generation:
    return Generation(
        replicas, rewards, {}, AgentHosts(), Gateways(), MagicMock(spec=SessionServers), **settings
    )


def run_config(*trees: Tree, **sections: Any) -> RunConfig:
    """One step on a CPU and on files that need not exist; later trees override it key by key, a list as a
    whole. Without what the run's mode does not read: what runs of tests have in common is for training."""
    merged: dict[str, Any] = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": [{"path": "train.jsonl"}]},
    }
    for tree in (*trees, sections):
        for section, values in tree.items():
            merged[section] = values if isinstance(values, list) else merged.get(section, {}) | dict(values)
    for path in UNREAD[merged["run"].get("mode", "train")].settings:
        section, _, key = path.partition(".")
        (merged.get(section, {}) if key else merged).pop(key or section, None)
    return resolve(validate(merged, "toy"), NO_GPUS)


def arithmetic_run(assets: Path, folder: Path) -> Tree:
    """Six on-policy steps of 4 x 4 samples on what `build_arithmetic` left in `assets`, for `run_config`."""
    return {
        "run": {"dir": folder, "steps": 6},
        "model": {"path": assets / "model"},
        "data": {"train": [{"path": assets / "train.parquet"}]},
        "coordinator": {"prompts_per_step": 4, "samples_per_prompt": 4, "dump": True},
        "rollout": {"sampling": {"max_new_tokens": 6}, "local": {"slots": 16, "max_length": 24}},
        "trainer": {"optimizer": {"learning_rate": 1e-3}},
    }


def model_spec(**overrides: Any) -> ModelSpec:
    """A Qwen2 of two narrow layers."""
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rope_theta": 10000.0,
        "norm_eps": 1e-6,
        "max_positions": 64,
        "head": "language",
        "tied": False,
        "qkv_bias": True,
        "qk_norm": False,
    }
    return ModelSpec(**(settings | overrides))


def write_run(folder: Path, *scores: float, outcome: Outcome | None = None, reason: str = "") -> Path:
    """A run of 10 steps below `folder`, with a row for each score. None: it ended without a summary."""
    config = run_config(
        run={"name": "toy", "steps": 10, "dir": folder},
        validation={"sets": [{"name": "sums", "path": "sums.jsonl"}], "best": "sums/avg@1"},
    )
    config.folder.mkdir(parents=True, exist_ok=True)
    write_resolved(config, config.folder / "config.json")
    if scores:
        with MetricsFile(config.folder / "metrics.jsonl", clock=lambda: 100.0) as metrics:
            for step, score in enumerate(scores, 1):
                metrics.write(step, {"critic/score/mean": score, "val/sums/avg@1": 1 - score})
    if outcome:
        complete_summary(config, outcome, reason)
    return config.folder
