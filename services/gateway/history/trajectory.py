"""Builds a session's trajectory from its turn records. Pure.

A root with tools, and one turn after it; then a title is asked for:

    records   0: parent -1, inserted [1, 2], drawn [3]    1: parent 0, inserted [4], drawn [5]
              2: parent -1, inserted [8], drawn [9], another head
    nodes     [1, 2] -> [3] -> [4] -> [5]    [8] -> [9]
    turns     0, 1 and 2, the last of them on the side

Records name their parents, so `runtime/trajectory.py`'s search by tokens would find nothing new; it costs the
whole history for each turn, and joins turns that only look the same.
"""

from collections.abc import Callable, Mapping, Sequence

from atoll.runtime.trajectory import inserted_node
from atoll.wire.types import (
    NEW_CONVERSATION,
    NO_TEXTS,
    WHOLE,
    Message,
    Node,
    SessionEnd,
    SessionId,
    SessionReward,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnRecord,
    TurnReward,
)


def text_message(drawn: Trajectory) -> Message:
    """A turn as a message, its calls as the text that they were written in."""
    return Message("assistant", drawn.text)


def build_trajectory(
    records: Sequence[TurnRecord],
    id: SessionId,
    end: SessionEnd,
    rewards: Sequence[SessionReward] = (),
    *,
    environment: Mapping[str, str] = NO_TEXTS,
    read_reply: Callable[[Trajectory], Message] = text_message,
) -> Trajectory | None:
    """A session's trajectory; None if it has no turn.

    Nodes and turns are in the order in which the turns began. Equal insertions after one node are one node. A
    conversation is a main or a side one by its head alone: `main_head`. Messages are those of the last path
    of the main ones, replies as `read_reply` has them. A reward for a turn of no token, which no token could
    carry, is for the whole trajectory.

    Raises ValueError for a root without tokens, and for a reward that names no turn of the session.
    """
    if not records:
        return None
    order = sorted(range(len(records)), key=lambda position: records[position].number)
    main = main_head([records[position] for position in order])
    nodes: list[Node] = []
    turns: list[Turn] = []
    inserted: dict[tuple[int, bytes], int] = {}  # parent and token ids -> node
    ends: dict[tuple[int, int], int] = {}  # record and branch -> what its next turn is below
    for position in order:
        record = records[position]
        above = ends[record.parent, record.parent_branch] if record.parent >= 0 else NEW_CONVERSATION
        if len(record.inserted_ids):
            place = above, record.inserted_ids.tobytes()
            if place not in inserted:
                inserted[place] = len(nodes)
                nodes.append(inserted_node(above, record.inserted_ids))
            above = inserted[place]
        elif above == NEW_CONVERSATION:
            raise ValueError(f"record {position}: a conversation whose first turn has an empty context")
        for branch, drawn in enumerate(record.drawn):
            node = drawn.nodes[drawn.turns[0].node]
            ends[position, branch] = len(nodes) if len(node.token_ids) else above
            turns.append(
                drawn.turns[0]._replace(
                    node=len(nodes), number=record.number, branch=branch, untrained=record.head != main
                )
            )
            nodes.append(node._replace(parent=above))
    is_done = end is SessionEnd.DONE
    return Trajectory(
        id.sample,
        id.attempt,
        tuple(nodes),
        tuple(turns),
        TrajectoryStatus.COMPLETED if is_done else TrajectoryStatus.TRUNCATED,
        tuple(_place_reward(reward, nodes, turns) for reward in rewards),
        "" if is_done else end.value,
        _read_path(records, [p for p in order if records[p].head == main][-1], read_reply),
        environment,
    )


def main_head(records: Sequence[TurnRecord]) -> bytes:
    """Of the main conversation: the first that offers tools, or the first if none does. `records`: one or
    more, in the order in which they began."""
    return next((record for record in records if record.has_tools), records[0]).head


def _place_reward(reward: SessionReward, nodes: Sequence[Node], turns: Sequence[Turn]) -> TurnReward:
    components = {reward.component: reward.value}
    if reward.turn is None:
        return TurnReward(WHOLE, reward.value, components)
    named = {(turn.number, turn.branch): turn.node for turn in turns}
    if reward.turn not in named:
        raise ValueError(
            f"reward {reward.component!r}: it names turn {reward.turn}, expected one of {sorted(named)}"
        )
    node = named[reward.turn]
    return TurnReward(node if len(nodes[node].token_ids) else WHOLE, reward.value, components)


def _read_path(
    records: Sequence[TurnRecord], position: int, read_reply: Callable[[Trajectory], Message]
) -> tuple[Message, ...]:
    """All messages down to a record's last reply."""
    branch = len(records[position].drawn) - 1
    parts: list[tuple[Message, ...]] = []
    while position >= 0:
        record = records[position]
        parts.append((*record.messages, read_reply(record.drawn[branch])))
        position, branch = record.parent, record.parent_branch
    return tuple(message for part in reversed(parts) for message in part)
