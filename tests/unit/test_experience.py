"""Layout, loss weights, minibatches and step metrics against values worked out by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.coordinator.algorithm import experience
from atoll.coordinator.algorithm.metrics import average_metrics, critic_metrics, step_metrics
from atoll.coordinator.validation import set_metrics
from atoll.wire.types import (
    BELOW_PROMPT,
    NEW_CONVERSATION,
    WHOLE,
    FinishReason,
    Group,
    Node,
    Trajectory,
    TurnReward,
    Version,
)
from tests import builders
from tests.builders import prompt, sample_id


def node(parent: int, ids: list[int], mask: list[int], version: int = 0) -> Node:
    logprobs = [id / -10 for id in ids]
    return builders.node(ids, mask, parent=parent, logprobs=logprobs, versions=Version("l", version))


def sample(number: int, index: int, *nodes: Node, score: float = 0.0) -> Trajectory:
    return builders.sample(sample_id(number, index), *nodes, score=score)


EMPTY = builders.sample(sample_id(9, 0), node(-1, [], []), score=0.0, reason=FinishReason.LENGTH)
GROUPS = [
    builders.group(
        sample(7, 0, node(-1, [3, 4], [1, 1], version=4), score=1.0),
        # two turns: the policy's [5], then the tool's [6] and the policy's [8, 9]
        sample(7, 1, node(-1, [5], [1], version=3), node(0, [6, 8, 9], [0, 1, 1], version=4)),
        ids=[1, 2],
    ),
    builders.group(EMPTY),
]


def test_layout_by_hand() -> None:
    layout = experience.lay_out(GROUPS)
    np.testing.assert_array_equal(layout.segments.token_ids, [1, 2, 3, 4, 5, 6, 8, 9, 1])
    np.testing.assert_array_equal(layout.segments.offsets, [0, 2, 4, 8, 9, 9])
    np.testing.assert_array_equal(layout.segments.parents, [-1, 0, 0, -1, 3])
    np.testing.assert_array_equal(layout.segments.groups, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(layout.segments.positions, [0, 1, 2, 3, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(layout.loss_mask_T, [0, 0, 1, 1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(layout.sample_T, [-1, -1, 0, 0, 1, 1, 1, 1, -1])
    np.testing.assert_array_equal(layout.group_N, [0, 0, 1])
    np.testing.assert_array_equal(layout.lengths, [2, 3, 0])
    np.testing.assert_array_equal(layout.last_N, [3, 7, 8])  # the empty response: its prompt's last token
    np.testing.assert_array_equal(layout.turn_lengths, [2, 1, 2])


def routed(node: Node, *numbers: int) -> Node:
    """With routes of one layer of one expert."""
    return node._replace(routes=np.array(numbers, np.uint8).reshape(-1, 1, 1))


def test_routes_by_hand() -> None:
    """A record ends before its node's last token. The first sample's begins with the prompt, and that of the
    second turn with the first one; what is recorded twice counts once. Last tokens are unknown."""
    first = sample(7, 0, routed(node(-1, [3, 4], [1, 1]), 10, 11, 12))
    second = sample(
        7,
        1,
        routed(node(-1, [5, 5], [1, 1]), 20),
        node(0, [6], [0]),
        routed(node(1, [8, 9], [1, 1]), 99, 21, 22, 23),
    )
    unrecorded = sample(7, 2, node(-1, [3, 4], [1, 1]))
    short = sample(7, 3, routed(node(-1, [3], [1])))
    layout = experience.lay_out([builders.group(first, second, unrecorded, short, ids=[1, 2])])
    routes = layout.segments.routes
    assert routes is not None
    assert (routes.shape, routes.dtype) == ((12, 1, 1), np.uint8)
    #                              prompt  first    second                   unrecorded  short
    assert routes.ravel().tolist() == [10, 11, 12, 255, 20, 21, 22, 23, 255, 255, 255, 255]
    assert experience.lay_out(GROUPS).segments.routes is None


def test_rewards_stand_at_the_last_token_of_their_turn_and_add_up() -> None:
    nodes = (
        node(-1, [3], [0]),  # a template token before anything was generated
        node(0, [5, 6], [1, 0]),
        node(1, [8, 9], [1, 1]),
        node(2, [7], [0]),  # what a tool said at the end
    )
    rewards = tuple(TurnReward(of, value, {}) for of, value in [(1, 0.1), (2, 0.2), (WHOLE, 0.3), (1, 0.4)])
    turns = sample(7, 0, *nodes)._replace(rewards=rewards)
    empty = sample(7, 1, node(-1, [], []), score=5.0)
    cut = sample(7, 2, node(-1, [4], [1]), node(0, [], []))._replace(rewards=(TurnReward(1, 9.0, {}),))
    layout = experience.lay_out([Group(prompt(7, [1, 2]), (turns, empty, cut))])
    # trained tokens 5, 8, 9, 4
    np.testing.assert_allclose(layout.rewards_R, [0.1 + 0.4, 0, 0.2 + 0.3, 0])
    np.testing.assert_array_equal(layout.at_the_end(np.array([1.0, 2.0, 3.0])), [0, 0, 1, 3])
    np.testing.assert_allclose(layout.sums(np.array([1.0, 2.0, 3.0, 4.0])), [6, 0, 4])
    np.testing.assert_array_equal(layout.pick(layout.place(np.array([1.0, 2.0, 3.0, 4.0]))), [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("named", "message"), [(0, "a node that the policy did not produce"), (2, "node 2 of 2")]
)
def test_a_reward_names_a_node_of_the_policy(named: int, message: str) -> None:
    turns = sample(7, 1, node(-1, [3], [0]), node(0, [5], [1]))
    turns = turns._replace(rewards=(TurnReward(named, 1.0, {}),))
    with pytest.raises(ValueError, match=f"sample toy/0/7/1: a reward names {message}"):
        experience.lay_out([Group(prompt(7, [1, 2]), (turns,))])


def test_conversations_of_a_sample_in_time_order() -> None:
    """Two main turns with a title in between, in a conversation of its own, whose first node the other sample
    has, too; then a compaction, and its first turn is drawn twice."""
    system = node(NEW_CONVERSATION, [20, 21], [0, 0])
    title = node(NEW_CONVERSATION, [20, 21], [0, 0])
    first = sample(
        7,
        0,
        node(BELOW_PROMPT, [30], [1]),
        system,
        node(1, [31], [1]),
        node(0, [22], [0]),
        node(3, [32, 33], [1, 1]),
        node(NEW_CONVERSATION, [23], [0]),
        node(5, [34], [1]),
        node(5, [35], [1]),
    )
    first = first._replace(
        rewards=(TurnReward(4, 1.0, {}), TurnReward(6, 2.0, {}), TurnReward(WHOLE, 4.0, {}))
    )
    second = sample(7, 1, title, node(0, [36], [1]), node(BELOW_PROMPT, [37], [1]))
    layout = experience.lay_out([Group(prompt(7, [1, 2]), (first, second))])
    segments = layout.segments
    pieces = np.split(segments.token_ids, segments.offsets[1:-1])
    assert [piece.tolist() for piece in pieces] == [
        *([1, 2], [30, 22, 32, 33], [20, 21], [31], [23], [34], [35]),
        *([36], [37]),
    ]
    assert segments.parents.tolist() == [-1, 0, -1, 2, -1, 4, 4, 2, 0]
    assert layout.sample_T.tolist() == [-1, -1, 0, 0, 0, 0, -1, -1, 0, 0, 0, 0, 1, 1]
    assert segments.token_ids[layout.trained].tolist() == [30, 31, 32, 33, 34, 35, 36, 37]
    assert layout.rewards_R.tolist() == [0, 0, 0, 1, 2, 4, 0, 0]
    assert layout.last_N.tolist() == [11, 13]
    assert layout.branches is not None
    # what the two draws after the compaction follow: all that came before
    assert layout.branches.lengths_B.tolist() == [4, 1, 1, 2]
    assert layout.branches.parents_B.tolist() == [-1, 0, 0, -1]
    assert layout.branches.samples_B.tolist() == [0, 0, 0, 1]
    assert layout.turn_lengths.tolist() == [1, 1, 2, 1, 1, 1, 1]  # the title's in between


def test_without_a_prompt_samples_are_trees_of_their_own() -> None:
    empty = builders.sample(sample_id(7, 2), node(BELOW_PROMPT, [], []), score=1.0)
    samples = sample(7, 0, node(-1, [3], [0]), node(0, [4], [1])), sample(7, 1, node(-1, [5], [0])), empty
    layout = experience.lay_out([Group(prompt(7, []), samples)])
    assert layout.segments.offsets.tolist() == [0, 0, 2, 3, 3]
    assert layout.segments.parents.tolist() == [-1, -1, -1, -1]
    assert layout.last_N.tolist() == [1, 2, -1]


def one_segment_per_sample(groups: list[Group]) -> dict[str, NDArray[Any]]:
    """What samples of one node are laid out as: loop over all, then one array of each."""
    tokens, mask, logprobs, owner, rewards, last = [], [], [], [], [], []
    offsets, parents, numbers, group_of = [0], [], [], []
    for g, each in enumerate(groups):
        root = len(parents)
        for parent, n, whole in [
            (-1, -1, None),
            *((root, len(group_of) + k, s) for k, s in enumerate(each.samples)),
        ]:
            ids = each.prompt.token_ids if whole is None else whole.nodes[0].token_ids
            length = len(ids)
            tokens += ids.tolist()
            mask += [whole is not None] * length
            logprobs += [0.0] * length if whole is None else whole.nodes[0].logprobs.tolist()
            owner += [n] * length
            if whole is not None:
                rewards += [0.0] * length
                for reward in whole.rewards if length else ():
                    rewards[-1] += reward.value
                last.append(len(tokens) - 1 if length else offsets[root + 1] - 1)
            offsets.append(len(tokens))
            parents.append(parent)
            numbers.append(g)
        group_of += [g] * len(each.samples)
    return {
        "token_ids": np.array(tokens, np.int32),
        "offsets": np.array(offsets, np.int64),
        "parents": np.array(parents, np.int32),
        "groups": np.array(numbers, np.int32),
        "loss_mask_T": np.array(mask, np.bool_),
        "rollout_logprobs_T": np.array(logprobs, np.float32),
        "sample_T": np.array(owner, np.int32),
        "trained": np.array(mask, np.bool_),
        "group_N": np.array(group_of, np.int64),
        "last_N": np.array(last, np.int64),
        "rewards_R": np.array(rewards, np.float64),
    }


def test_single_turns_are_laid_out_node_by_node() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for number in range(20):
        samples = []
        for index in range(int(rng.integers(1, 5))):
            ids = rng.integers(3, 9, rng.integers(0, 6)).tolist()  # some are empty, some equal
            rewards = [TurnReward(of, float(rng.normal()), {}) for of in (0, WHOLE)[: rng.integers(0, 3)]]
            one = builders.node(ids, logprobs=rng.normal(size=len(ids)).tolist())
            samples.append(builders.sample(sample_id(number, index), one, rewards=tuple(rewards)))
        groups.append(builders.group(*samples, ids=rng.integers(3, 9, 3).tolist()))
    layout = experience.lay_out(groups)
    for name, expected in one_segment_per_sample(groups).items():
        got = getattr(layout.segments if hasattr(layout.segments, name) else layout, name)
        assert got.dtype == expected.dtype, name
        assert got.tobytes() == expected.tobytes(), name
    assert layout.branches is None


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # the first sample has 2 loss-masked tokens, the second 3, the third none; weights 1, 2, 3
        ("token_mean", np.array([0, 0, 1, 1, 2, 0, 2, 2, 0]) / (2 * 1 + 3 * 2)),
        ("seq_mean_token_mean", np.array([0, 0, 1 / 2, 1 / 2, 2 / 3, 0, 2 / 3, 2 / 3, 0]) / 3),
        ("seq_mean_token_sum", np.array([0, 0, 1, 1, 2, 0, 2, 2, 0]) / 3),
        ("seq_mean_token_sum_norm", np.array([0, 0, 1, 1, 2, 0, 2, 2, 0]) / (3 * 8)),
    ],
)
def test_loss_weights_by_hand(aggregation: str, expected: NDArray[np.float64]) -> None:
    layout = experience.lay_out(GROUPS)
    weights = experience.loss_weights(
        layout.loss_mask_T, layout.sample_T, np.array([1.0, 2.0, 3.0]), aggregation, max_length=8
    )
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_split_keeps_groups_whole_and_tokens_and_samples_aligned() -> None:
    layout = experience.lay_out(GROUPS)
    first, second = experience.split(layout, 2)
    assert (first.tokens, first.samples) == (slice(0, 8), slice(0, 2))
    assert (second.tokens, second.samples) == (slice(8, 9), slice(2, 3))
    np.testing.assert_array_equal(second.segments.parents, [-1, 0])
    np.testing.assert_array_equal(second.segments.offsets, [0, 1, 1])
    np.testing.assert_array_equal(first.segments.token_ids, layout.segments.token_ids[:8])


def test_supervised_sequences_weigh_learned_tokens_only() -> None:
    sequences = [
        (np.array([1, 2, 3], np.int32), np.array([False, False, True])),
        (np.array([4, 5, 6], np.int32), np.array([False, True, True])),
    ]
    segments, weights = experience.lay_out_supervised(sequences)
    np.testing.assert_array_equal(segments.token_ids, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(segments.offsets, [0, 3, 6])
    np.testing.assert_array_equal(segments.parents, [-1, -1])
    np.testing.assert_array_equal(segments.groups, [0, 1])
    np.testing.assert_allclose(weights, np.array([0, 0, 1, 0, 1, 1]) / 3, rtol=1e-6)


def test_critic_metrics_by_hand() -> None:
    # returns 1, 3 have variance 1; errors 1 - 0.5 and 3 - 2 have variance ((0.5 - 1) / 2)^2 = 1/16
    metrics = critic_metrics("critic", np.array([0.5, 2.0]), np.array([1.0, 3.0]))
    assert metrics["critic/vf_explained_var"] == pytest.approx(15 / 16, abs=1e-5)
    assert metrics["critic/returns/mean"] == 2
    assert metrics["critic/values/max"] == 2
    assert critic_metrics("critic", None, np.array([])) == {}


def test_step_metrics_by_hand() -> None:
    metrics = step_metrics(GROUPS, Version("l", 4))
    expected = {
        "training/version": 4,
        "critic/score/mean": 1 / 3,
        "critic/score/max": 1,
        "critic/score/min": 0,
        "critic/score/equal_share": 0,  # of the one group with several samples: 1 and 0
        "response_length/mean": 5 / 3,  # tokens of tools do not count
        "response_length/max": 3,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 1.5,
        "perf/total_num_tokens": 2 * 2 + 1 + 5,
        "staleness/mean": 1 / 3,
        "staleness/max": 1,
        "reward/exact_match/mean": 1 / 3,
    }
    assert metrics == pytest.approx(expected)


def test_staleness_is_that_of_tokens_that_are_trained_on() -> None:
    metrics = step_metrics(GROUPS, Version("l", 6), oldest=4)  # the first turn of the second sample is of 3
    staleness = {name: value for name, value in metrics.items() if name.startswith("staleness")}
    assert staleness == pytest.approx(
        {"staleness/mean": 4 / 3, "staleness/max": 2, "staleness/masked_fraction": 1 / 5}
    )
    assert step_metrics([builders.group(EMPTY)], Version("l", 6), 4)["staleness/masked_fraction"] == 0


def test_mean_of_averages_what_each_minibatch_reports() -> None:
    assert average_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_validation_metrics_by_hand() -> None:
    graded = [
        Group(prompt(i), tuple(sample(i, k, node(-1, [3], [1]), score=s) for k, s in enumerate(scores)))
        for i, scores in enumerate([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.5, 0.0)])
    ]
    metrics = set_metrics("sums", graded, pass_score=1.0)
    assert metrics == {
        "val/sums/avg@2": pytest.approx(3.5 / 8),
        "val/sums/pass@2": 0.5,
        "val/sums/response_length/mean": 1.0,
    }
