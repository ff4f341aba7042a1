"""A trajectory's tree of token deltas, as turns extend or branch it. Pure.

A trajectory's nodes are in the order in which they came, so parents come before their children. Letters in
shapes: T tokens.
"""

from collections.abc import Sequence

import numpy as np

from atoll.wire.types import BELOW_PROMPT, NEW_CONVERSATION, Bool, Float32, Int32, Node, VersionSpan

NOT_SAMPLED: tuple[VersionSpan, ...] = ()


def extend(
    nodes: tuple[Node, ...],
    prompt_ids: Int32,
    context_ids: Int32,
    *,
    token_ids: Int32,
    logprobs: Float32,
    spans: tuple[VersionSpan, ...],
) -> tuple[tuple[Node, ...], int]:
    """The nodes with one more turn, and the number of the node that the policy produced in it.

    The policy saw `context_ids` and produced `token_ids`. What the tree does not hold of the context becomes
    a node of its own above the turn's. So a turn adds two nodes, or one if the tree holds the whole context:
    the first turn after the prompt, or one that is drawn beside another.

    The policy answers the prompt `12+34=` with a call of a tool, the tool says `46`, and the policy `46.`:

        nodes, _ = extend((), prompt, prompt, token_ids=call, ...)  # adds call
        nodes, _ = extend(nodes, prompt, prompt + call + tool, ...)  # adds tool below call, then `46.`

    Raises ValueError for an empty context: no policy predicts a first token.
    """
    if len(context_ids) == 0:
        raise ValueError("a turn has an empty context, expected at least one token before what it produces")
    parent, num_held = find_parent(nodes, prompt_ids, context_ids)
    if num_held < len(context_ids):
        nodes = (*nodes, inserted_node(parent, context_ids[num_held:]))
        parent = len(nodes) - 1
    produced = Node(parent, token_ids, _mask(token_ids, True), logprobs, spans)
    return (*nodes, produced), len(nodes)


def find_parent(nodes: Sequence[Node], prompt_ids: Int32, context_ids: Int32) -> tuple[int, int]:
    """The parent of what follows `context_ids`, and how many of these tokens lie above that.

    It is the deepest node whose whole path, prompt included, is a prefix of the context, and the latest of
    equally deep ones. If the context leaves a node halfway, the tokens that they have in common are repeated:
    rewards name nodes by number, and a split would renumber them. A node without tokens is never the parent:
    that turn was cut before its first token, and another from the same context stands beside it.
    """
    num_above = {NEW_CONVERSATION: 0}  # tokens down to the end of each parent that fits
    if _stands_at(0, prompt_ids, context_ids):
        num_above[BELOW_PROMPT] = len(prompt_ids)
    for number, node in enumerate(nodes):
        start = num_above.get(node.parent)
        if start is not None and len(node.token_ids) and _stands_at(start, node.token_ids, context_ids):
            num_above[number] = start + len(node.token_ids)
    parent = max(num_above, key=lambda number: (num_above[number], number))
    return parent, num_above[parent]


def inserted_node(parent: int, token_ids: Int32) -> Node:
    """Tokens that the policy did not produce."""
    return Node(parent, token_ids, _mask(token_ids, False), np.zeros(len(token_ids), np.float32), NOT_SAMPLED)


def _stands_at(start: int, token_ids: Int32, context_ids: Int32) -> bool:
    return np.array_equal(context_ids[start : start + len(token_ids)], token_ids)


def _mask(token_ids: Int32, value: bool) -> Bool:
    return np.full(len(token_ids), value, np.bool_)
