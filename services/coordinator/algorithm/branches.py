"""Which decision of a trajectory follows which. Pure numpy.

A decision is a node in which the policy produced tokens. Each follows the one before it in time, also if that
one belongs to another conversation, such as the one that a compaction abandoned. Only decisions drawn side by
side from one context are alternatives: none of them follows another, and what continues one of them does not
follow the others. So decisions form a tree, and a branch is a run of them without a choice in between.

B: branches, those of one sample after those of another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.wire.types import Int64, Node

Context = tuple[int, bytes]  # of a decision: its node's parent, and what was inserted between the two


@dataclass(frozen=True, eq=False)
class Branches:
    lengths_B: Int64  # tokens, consecutive ones of a sample
    parents_B: Int64  # the branch that each follows; -1: it begins its sample. Parents come first
    samples_B: Int64  # ascending

    @classmethod
    def unbranched(cls, lengths_N: Int64) -> "Branches":
        """Samples without alternatives: one branch each."""
        return cls(lengths_N, np.full(len(lengths_N), -1), np.arange(len(lengths_N)))

    @cached_property
    def ends(self) -> Int64:
        """[B] number of the first token behind each branch."""
        return np.cumsum(self.lengths_B)

    def children_first(self) -> Iterator[Int64]:
        """Numbers of branches, level by level: what follows a branch comes before it."""
        heights = np.zeros(len(self.parents_B), np.int64)
        for branch in np.flatnonzero(self.parents_B >= 0)[::-1]:
            parent = self.parents_B[branch]
            heights[parent] = max(heights[parent], heights[branch] + 1)
        for height in range(heights.max(initial=-1) + 1):
            yield np.flatnonzero(heights == height)


def find_branches(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Tokens and parent of each branch of one sample, in time order; a parent is an earlier branch or -1."""
    counts = [int(np.count_nonzero(node.loss_mask)) for node in nodes]
    decisions = [number for number, count in enumerate(counts) if count]
    contexts = [_context(nodes[number]) for number in decisions]
    if len(set(contexts)) == len(contexts):  # no alternatives
        return [(sum(counts), -1)]
    follows = _follow(nodes, decisions, contexts)
    num_followers = np.bincount([before for before in follows if before >= 0], minlength=len(follows))
    branch_of: list[int] = []  # each decision's
    branches: list[tuple[int, int]] = []
    for decision, before in enumerate(follows):
        count = counts[decisions[decision]]
        if 0 <= before == decision - 1 and num_followers[before] == 1:
            branches[-1] = (branches[-1][0] + count, branches[-1][1])
        else:
            branches.append((count, branch_of[before] if before >= 0 else -1))
        branch_of.append(len(branches) - 1)
    return branches


def _context(node: Node) -> Context:
    return node.parent, node.token_ids[: int(node.loss_mask.argmax())].tobytes()


def _follow(nodes: Sequence[Node], decisions: Sequence[int], contexts: Sequence[Context]) -> list[int]:
    """The decision that each one follows, by number among them; -1: none.

    It follows what its alternatives follow. If it has none before it, it follows the latest decision that is
    not on the other side of a choice which its own context has made.
    """
    number_of = {node: decision for decision, node in enumerate(decisions)}
    drawn_first: dict[Context, int] = {}
    follows: list[int] = []
    choices: list[
        dict[Context, int]
    ] = []  # of each decision and all that it follows: which one a context got
    above: list[dict[Context, int]] = []  # the same of the decisions on each node's path
    for number, node in enumerate(nodes):
        on_path = above[node.parent] if node.parent >= 0 else {}
        decision = number_of.get(number)
        if decision is not None:
            context = contexts[decision]
            first = drawn_first.setdefault(context, decision)
            follows.append(follows[first] if first < decision else _latest(choices, on_path))
            before = choices[follows[-1]] if follows[-1] >= 0 else {}
            choices.append(before | {context: decision})
            on_path = on_path | {context: decision}
        above.append(on_path)
    return follows


def _latest(choices: Sequence[dict[Context, int]], on_path: dict[Context, int]) -> int:
    """The latest decision that agrees with all choices on a path; -1: there is none."""
    for decision in range(len(choices) - 1, -1, -1):
        made = choices[decision]
        if all(made.get(context, choice) == choice for context, choice in on_path.items()):
            return decision
    return -1
