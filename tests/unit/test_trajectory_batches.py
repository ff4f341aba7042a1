"""Layouts, rewards, advantages, returns and loss weights of random trajectories, against brute force."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.algorithm.algorithm import Algorithm, PreparedStep
from atoll.coordinator.algorithm.experience import lay_out
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import (
    Float32,
    Group,
    Node,
    PolicyBatch,
    Segments,
    ValueBatch,
    Version,
    VersionSpan,
)
from tests.builders import run_config
from tests.trajectories import GAMMA, PROMPT, Reading, Tokens, batches, path, read, said_after

LAM, ALPHA = 0.8, 0.3


class Model:
    """Answers what `said_after` says; log-probabilities nobody asks for."""

    async def compute_values(self, segments: Segments) -> Float32:
        contexts = sequences(segments)
        return np.array([said_after(context) for context in contexts], np.float32)


def sequences(segments: Segments) -> list[Tokens]:
    """Of each token, all that its model sees, itself included: from the segments' definition."""
    ends: list[Tokens] = []  # of each segment
    seen: list[Tokens] = []
    for s, parent in enumerate(segments.parents.tolist()):
        context: Tokens = ends[parent] if parent >= 0 else ()
        for id in segments.token_ids[segments.offsets[s] : segments.offsets[s + 1]].tolist():
            context = (*context, id)
            seen.append(context)
        ends.append(context)
    return seen


def prepare(
    groups: Sequence[Group], advantage: Any, aggregation: str = "token_mean", oldest: int = 0
) -> PreparedStep:
    name = advantage["name"] if isinstance(advantage, dict) else advantage
    critic = {"critic": Model()} if name in ("gae", "vapo", "turn_gae") else {}
    config = run_config(
        coordinator={"prompts_per_step": 2, "samples_per_prompt": 2, "greedy_baseline": name == "remax"},
        algorithm={"advantage": advantage, "aggregation": aggregation},
        reward={"graders": ({"name": "exact_match"},)},
        **{role: {} for role in critic},
    )
    algorithm = Algorithm(config, {"actor": Model(), **critic}, None)  # type: ignore[arg-type]
    return asyncio.run(algorithm.prepare(groups, StepTimer(), oldest))


@given(batches())
def test_the_layout_has_every_token_once_and_below_its_context(groups: list[Group]) -> None:
    layout, readings = lay_out(groups), read(groups)
    seen = sequences(layout.segments)
    expected = [(*token.context, token.id) for each in readings for r in each for token in r.tokens]
    order = np.arange(len(seen))[layout.trained]
    assert [seen[t] for t in order] == expected
    assert sorted(order) == np.flatnonzero(layout.loss_mask_T).tolist()
    counts = [len(r.tokens) for each in readings for r in each]
    np.testing.assert_array_equal(layout.lengths, counts)
    np.testing.assert_array_equal(layout.trained_samples, np.repeat(np.arange(len(counts)), counts))
    np.testing.assert_allclose(layout.rewards_R, [x for each in readings for r in each for x in r.rewards])
    turns = [Counter(token.node for token in r.tokens) for each in readings for r in each]
    assert layout.turn_lengths.tolist() == [count for each in turns for count in each.values()]
    # what is not trained: each prompt once, and of each group's samples what they have for themselves
    for number, group in enumerate(groups):
        firsts = Counter((node.parent, tuple(node.token_ids)) for node in first_inserted(group))
        nodes = [node for each in group.samples for node in each.nodes]
        own = sum(len(node.token_ids) for node in nodes) + len(PROMPT)
        own -= sum((count - 1) * len(ids) for (_, ids), count in firsts.items())
        segments = np.flatnonzero(layout.segments.groups == number)
        assert np.diff(layout.segments.offsets)[segments].sum() == own
    ends = [path(each.nodes, len(each.nodes) - 1) for group in groups for each in group.samples]
    assert [seen[t] for t in layout.last_N] == ends


def first_inserted(group: Group) -> list[Node]:
    return [
        node for each in group.samples for node in each.nodes if node.parent < 0 and not node.loss_mask.any()
    ]


def whiten(numbers: Sequence[float]) -> list[float]:
    if not numbers:
        return []
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in numbers]


def on_all_tokens(of_group: Callable[[list[float], list[int]], list[float]]) -> Callable[..., list[float]]:
    """Advantages of a group's samples by their scores and lengths."""

    def advantages(readings: list[list[Reading]]) -> list[float]:
        out = []
        for each in readings:
            scores = [sum(reward.value for reward in r.sample.rewards) for r in each]
            lengths = [len(r.tokens) for r in each]
            for advantage, length in zip(of_group(scores, lengths), lengths, strict=True):
                out += [advantage] * length
        return out

    return advantages


def centre(scores: list[float], _: list[int]) -> list[float]:
    return [s - sum(scores) / len(scores) for s in scores]


def standardise(scores: list[float], lengths: list[int]) -> list[float]:
    deviation = math.sqrt(sum(c**2 for c in centre(scores, lengths)) / (len(scores) - 1))
    return [c / (deviation + 1e-6) for c in centre(scores, lengths)]


def leave_one_out(scores: list[float], _: list[int]) -> list[float]:
    return [s - (sum(scores) - s) / (len(scores) - 1) for s in scores]


def off_the_length_weighted_mean(scores: list[float], lengths: list[int]) -> list[float]:
    mean = sum(s * n for s, n in zip(scores, lengths, strict=True)) / max(sum(lengths), 1)
    return [s - mean for s in scores]


def best_of_two(scores: list[float], _: list[int]) -> list[float]:
    low, high = sorted(scores)
    deviation = (high - low) / math.sqrt(2)
    return [(high - low) / (deviation + 1e-6) if s == high and low < high else 0.0 for s in scores]


def gpg(readings: list[list[Reading]]) -> list[float]:
    scores = [r.sample.score for each in readings for r in each]
    alpha = len(scores) / max(1, sum(s != 0 for s in scores))
    return [alpha * a for a in on_all_tokens(centre)(readings)]


def flat(per_sample: Callable[[Reading], list[float]]) -> Callable[[list[list[Reading]]], list[float]]:
    return lambda readings: [x for each in readings for r in each for x in per_sample(r)]


def of_length(r: Reading) -> float:
    return GAMMA * max(0.0, 1 - 1 / (ALPHA * max(len(r.tokens), 1)))


def remax(readings: list[list[Reading]]) -> list[float]:
    baselines = [(number - 3) / 4 + 0.5 for number in range(len(readings))]  # of the greedy samples above
    return [
        x - baseline
        for each, baseline in zip(readings, baselines, strict=True)
        for r in each
        for x in r.carried_back(r.rewards, 1.0)
    ]


def discounted_episodes(readings: list[list[Reading]]) -> list[float]:
    out = []
    for each in readings:
        scores = [
            sum(GAMMA ** (len(r.turn_history[node]) - 1) * reward for node, reward in r.turn_rewards.items())
            + (r.sample.score - sum(r.rewards))  # without a token
            for r in each
        ]
        for advantage, r in zip(standardise(scores, []), each, strict=True):
            out += [advantage] * len(r.tokens)
    return out


ADVANTAGES: dict[str, tuple[Any, Callable[[list[list[Reading]]], list[float]]]] = {
    "gae": (
        {"name": "gae", "gamma": GAMMA, "lam": LAM},
        lambda readings: whiten(flat(lambda r: r.carried_back(r.errors, GAMMA * LAM))(readings)),
    ),
    "vapo": (
        {"name": "vapo", "gamma": GAMMA, "value_lam": LAM, "length_alpha": ALPHA},
        lambda readings: whiten(flat(lambda r: r.carried_back(r.errors, of_length(r)))(readings)),
    ),
    "reinforce_pp": (
        {"name": "reinforce_pp", "gamma": GAMMA},
        lambda readings: whiten(flat(lambda r: r.carried_back(r.rewards, GAMMA))(readings)),
    ),
    "remax": ("remax", remax),
    "grpo": ("grpo", on_all_tokens(standardise)),
    "dr_grpo": ("dr_grpo", on_all_tokens(centre)),
    "rloo": ("rloo", on_all_tokens(leave_one_out)),
    "reinforce_pp_baseline": (
        "reinforce_pp_baseline",
        lambda readings: whiten(on_all_tokens(centre)(readings)),
    ),
    "opo": ("opo", on_all_tokens(off_the_length_weighted_mean)),
    "gpg": ("gpg", gpg),
    "pass_at_k": ("pass_at_k", on_all_tokens(best_of_two)),
    "gdpo": ("gdpo", lambda readings: whiten(on_all_tokens(standardise)(readings))),
    "turn_gae": (
        {"name": "turn_gae", "gamma": GAMMA, "lam": LAM},
        lambda readings: whiten(flat(turn_advantages)(readings)),
    ),
    "turn_returns": (
        {"name": "turn_returns", "gamma": GAMMA},
        lambda readings: whiten(
            flat(lambda r: r.on_tokens(r.carried_back_by_turn(r.turn_rewards, GAMMA)))(readings)
        ),
    ),
    "episode_grpo": ({"name": "episode_grpo", "gamma": GAMMA}, discounted_episodes),
}


def turn_advantages(r: Reading) -> list[float]:
    return r.on_tokens(r.carried_back_by_turn(r.turn_errors, GAMMA * LAM))


def returns(name: str, r: Reading) -> list[float]:
    """The critic's targets."""
    if name == "turn_gae":
        advantages, values = turn_advantages(r), r.on_tokens(r.turn_values)
    else:
        advantages, values = r.carried_back(r.errors, GAMMA * LAM), r.values
    return [x + v for x, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("name", ADVANTAGES)
@given(groups=batches())
@settings(max_examples=40)
def test_advantages_and_returns(name: str, groups: list[Group]) -> None:
    setting, expected = ADVANTAGES[name]
    prepared, layout, readings = prepare(groups, setting), lay_out(groups), read(groups)
    (batch,) = prepared.batches["actor"]
    assert isinstance(batch, PolicyBatch)
    want = expected(readings)
    np.testing.assert_allclose(batch.advantages[layout.trained], want, rtol=1e-4, atol=1e-4)
    assert not batch.advantages[~layout.loss_mask_T].any()
    for learned in prepared.batches.get("critic", ()):
        assert isinstance(learned, ValueBatch)
        targets = flat(partial(returns, name))(readings)
        np.testing.assert_allclose(learned.returns[layout.trained], targets, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(learned.values[layout.trained], flat(lambda r: r.values)(readings))


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
@given(groups=batches())
@settings(max_examples=30)
def test_loss_weights_count_trajectories(aggregation: str, groups: list[Group]) -> None:
    (batch,) = prepare(groups, "grpo", aggregation).batches["actor"]
    readings = [r for each in read(groups) for r in each]
    total, longest = sum(len(r.tokens) for r in readings), run_config().rollout.sampling.max_new_tokens
    of_one = {
        "token_mean": lambda length: 1 / total,
        "seq_mean_token_mean": lambda length: 1 / (length * len(readings)),
        "seq_mean_token_sum": lambda length: 1 / len(readings),
        "seq_mean_token_sum_norm": lambda length: 1 / (len(readings) * longest),
    }[aggregation]
    layout = lay_out(groups)
    want = [of_one(len(r.tokens)) for r in readings for _ in r.tokens]
    np.testing.assert_allclose(batch.loss_weights[layout.trained], want, rtol=1e-6)
    assert np.count_nonzero(batch.loss_weights) == total


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
)
@given(groups=batches(), data=st.data())
@settings(max_examples=30)
def test_turns_that_are_too_old_have_no_weight_and_change_no_advantage(
    aggregation: str, groups: list[Group], data: st.DataObject
) -> None:
    ages = data.draw(st.lists(st.integers(0, 3), min_size=5, max_size=5))  # by the turn's number
    groups, oldest = [aged(group, ages) for group in groups], data.draw(st.integers(0, 4))
    everything, prepared = (prepare(groups, "grpo", aggregation, since) for since in (0, oldest))
    (of_all,), (batch,) = everything.batches["actor"], prepared.batches["actor"]
    layout, readings = lay_out(groups), [r for each in read(groups) for r in each]
    fresh = [[r.sample.nodes[t.node].spans[0].version.number >= oldest for t in r.tokens] for r in readings]
    total, longest = max(sum(map(sum, fresh)), 1), run_config().rollout.sampling.max_new_tokens
    of_one = {
        "token_mean": lambda length: 1 / total,
        "seq_mean_token_mean": lambda length: 1 / (max(length, 1) * len(readings)),
        "seq_mean_token_sum": lambda length: 1 / len(readings),
        "seq_mean_token_sum_norm": lambda length: 1 / (len(readings) * longest),
    }[aggregation]
    want = [of_one(sum(each)) if is_fresh else 0.0 for each in fresh for is_fresh in each]
    np.testing.assert_allclose(batch.loss_weights[layout.trained], want, rtol=1e-6)
    assert np.count_nonzero(batch.loss_weights) == sum(map(sum, fresh))
    assert isinstance(batch, PolicyBatch)
    assert isinstance(of_all, PolicyBatch)
    np.testing.assert_array_equal(batch.advantages, of_all.advantages)
    assert prepared.metrics == everything.metrics


def aged(group: Group, ages: Sequence[int]) -> Group:
    """Each turn's later tokens are of the version after that of its first one."""

    def spans(count: int, age: int) -> tuple[VersionSpan, ...]:
        return VersionSpan(Version("l", age), 0, 1), VersionSpan(Version("l", age + 1), 1, count)

    samples = []
    for sample in group.samples:
        numbers = iter(ages)
        nodes = [
            node._replace(spans=spans(node.num_produced, next(numbers))) if node.num_produced else node
            for node in sample.nodes
        ]
        samples.append(sample._replace(nodes=tuple(nodes)))
    return replace(group, samples=tuple(samples))
