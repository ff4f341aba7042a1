"""Turns that extend and branch a tree, by hand and against a look at every node's whole path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.trajectory import extend
from atoll.wire.types import BELOW_PROMPT, NEW_CONVERSATION, Node
from tests.trajectories import PROMPT, Call, calls, path, play, turn


def shape(nodes: tuple[Node, ...]) -> list[tuple[int, list[int], bool]]:
    """Parent, tokens and whether the policy produced them."""
    return [(node.parent, node.token_ids.tolist(), bool(node.loss_mask.all())) for node in nodes]


def test_a_tool_loop_is_one_chain() -> None:
    nodes, first = turn((), [1, 2], [3, 4])
    assert (shape(nodes), first) == ([(BELOW_PROMPT, [3, 4], True)], 0)
    nodes, second = turn(nodes, [1, 2, 3, 4, 5], [6])
    assert second == 2
    assert shape(nodes) == [(BELOW_PROMPT, [3, 4], True), (0, [5], False), (1, [6], True)]
    assert nodes[0].logprobs.tolist() == [-1, -1]
    assert (nodes[1].logprobs.tolist(), nodes[1].spans) == ([0], ())
    assert [(span.start, span.end) for span in nodes[2].spans] == [(0, 1)]


def test_the_same_context_again_stands_beside_the_first() -> None:
    nodes, _ = turn((), [1, 2], [3])
    nodes, _ = turn(nodes, [1, 2], [4])
    nodes, _ = turn(nodes, [1, 2, 4, 5], [6])
    nodes, last = turn(nodes, [1, 2, 4, 5], [])  # cut before its first token
    nodes, again = turn(nodes, [1, 2, 4, 5], [7])
    assert [node.parent for node in nodes] == [BELOW_PROMPT, BELOW_PROMPT, 1, 2, 2, 2]
    assert (last, again) == (4, 5)


def test_a_context_that_leaves_a_node_halfway_repeats_its_beginning() -> None:
    nodes, _ = turn((), [1, 2, 5, 6], [3])
    nodes, produced = turn(nodes, [1, 2, 5, 7], [4])
    assert shape(nodes)[2:] == [(BELOW_PROMPT, [5, 7], False), (2, [4], True)]
    assert produced == 3


def test_a_context_without_the_prompt_is_another_conversation() -> None:
    nodes, _ = turn((), [1, 2], [3])
    nodes, _ = turn(nodes, [9, 8], [7])
    nodes, _ = turn(nodes, [9, 8, 7, 6], [5])
    nodes, _ = turn(nodes, [1], [4])  # shorter than the prompt
    assert [node.parent for node in nodes] == [BELOW_PROMPT, NEW_CONVERSATION, 1, 2, 3, NEW_CONVERSATION, 5]
    assert shape(nodes)[3] == (2, [6], False)


def test_of_two_equal_branches_the_later_goes_on() -> None:
    nodes, _ = turn((), [1, 2], [3])
    nodes, _ = turn(nodes, [1, 2], [3])
    nodes, _ = turn(nodes, [1, 2, 3, 4], [5])
    assert [node.parent for node in nodes] == [BELOW_PROMPT, BELOW_PROMPT, 1, 2]


def test_an_empty_prompt_is_above_every_conversation() -> None:
    ids, no_ids = np.array([4], np.int32), np.zeros(0, np.int32)
    nodes, _ = extend((), no_ids, ids, token_ids=ids, logprobs=np.zeros(1, np.float32), spans=())
    assert [node.parent for node in nodes] == [BELOW_PROMPT, 0]
    with pytest.raises(ValueError, match="empty context"):
        extend((), no_ids, no_ids, token_ids=ids, logprobs=np.zeros(1, np.float32), spans=())


@given(st.lists(calls(), max_size=8))
def test_each_turn_follows_its_whole_context(session: list[Call]) -> None:
    nodes: tuple[Node, ...] = ()
    for context, produced in play(session):
        before, (nodes, number) = nodes, turn(nodes, context, produced)
        assert nodes[: len(before)] == before
        added = nodes[len(before) :]
        assert number == len(nodes) - 1
        assert path(nodes, nodes[-1].parent) == tuple(context)
        assert added[-1].token_ids.tolist() == produced
        assert added[-1].loss_mask.all()
        # what the tree held of it: the longest path that the context begins with
        held = [0] + [len(PROMPT)] * (tuple(context[: len(PROMPT)]) == PROMPT)
        paths = [path(before, i) for i in range(len(before)) if len(before[i].token_ids)]
        held += [len(p) for p in paths if tuple(context[: len(p)]) == p]
        inserted = context[max(held) :]
        assert len(added) == 1 + bool(inserted)
        if inserted:
            assert added[0].token_ids.tolist() == inserted
            assert not added[0].loss_mask.any()
