"""What a session remembers, against agents that edit their histories and a matcher over whole lists."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from atoll.gateway.history.canonical import canonical, digest_request, head
from atoll.gateway.history.trajectory import build_trajectory
from atoll.gateway.history.tree import ROOT, Cause, SessionTree
from atoll.wire.codec.gateway import dump_turn_record, parse_turn_record
from atoll.wire.codec.trajectories import decode_trajectories, encode_trajectories
from atoll.wire.types import (
    NEW_CONVERSATION,
    WHOLE,
    Message,
    Node,
    SessionEnd,
    SessionId,
    SessionReward,
    ToolCall,
    TrajectoryStatus,
    TurnRecord,
)
from tests import builders
from tests.gateway.histories import TOOLS, EditingAgent

ID = SessionId(builders.sample_id(), 2)
SYSTEM, ASK, YES, NO = (
    Message("system", "s"),
    Message("user", "u"),
    Message("assistant", "yes"),
    Message("assistant", "no"),
)
MORE, OTHER = Message("tool", "t", (), "c1"), Message("user", "other")


@pytest.fixture(scope="module")
def sessions(request: pytest.FixtureRequest) -> list[EditingAgent]:
    """While they run, they compare each match and each context with the plain matcher's."""
    agents = [EditingAgent(random.Random(seed)) for seed in range(request.config.getoption("--edits") // 20)]
    for agent in agents:
        agent.run(20)
    return agents


def test_each_cause_occurs_and_is_counted(sessions: list[EditingAgent]) -> None:
    total: Counter[str] = Counter()
    for agent in sessions:
        assert agent.tree.branches == agent.plain.causes()
        total += agent.tree.branches
        assert agent.tree.num_turns == sum(len(turn.replies) for turn in agent.plain.turns)
        assert agent.tree.num_produced == sum(len(i) for turn in agent.plain.turns for i in turn.reply_ids)
    assert total.keys() == {*Cause} - {""}
    assert min(total.values()) > len(sessions) / 4


def test_a_trajectory_holds_what_was_sampled_after_what_the_policy_saw(sessions: list[EditingAgent]) -> None:
    for agent in sessions:
        trajectory = build_trajectory(agent.records, ID, SessionEnd.DONE)
        assert trajectory is not None
        [again] = decode_trajectories(encode_trajectories([trajectory]))
        assert again.turns == trajectory.turns
        drawn = [each.nodes[0] for record in agent.records for each in record.drawn]
        kept = [trajectory.nodes[turn.node] for turn in trajectory.turns]
        assert Counter(map(sampled, kept)) == Counter(map(sampled, drawn))
        assert sum(node.loss_mask.sum() for node in trajectory.nodes) == sum(len(n.token_ids) for n in drawn)
        contexts = {r.number: t.context_ids for r, t in zip(agent.records, agent.plain.turns, strict=True)}
        replies = {r.number: t.reply_ids for r, t in zip(agent.records, agent.plain.turns, strict=True)}
        for turn in trajectory.turns:
            node = trajectory.nodes[turn.node]
            assert path(trajectory.nodes, node.parent) == contexts[turn.number]
            assert node.token_ids.tolist() == replies[turn.number][turn.branch]
        assert [turn.number for turn in trajectory.turns] == sorted(turn.number for turn in trajectory.turns)
        for number, node in enumerate(trajectory.nodes):
            assert node.parent < number
            produced = number in {turn.node for turn in trajectory.turns}
            assert node.loss_mask.tolist() == [produced] * len(node.token_ids)
            assert produced or len(node.token_ids)


def test_records_from_the_store_give_the_same_tree(sessions: list[EditingAgent]) -> None:
    for agent in sessions:
        records = [parse_turn_record(dump_turn_record(record)) for record in agent.records]
        for before, after in zip(agent.records, records, strict=True):
            assert plain(after) == plain(before)
        tree = SessionTree(records)
        assert (len(tree), tree.num_turns, tree.num_produced) == (
            len(agent.tree),
            agent.tree.num_turns,
            agent.tree.num_produced,
        )
        assert tree.branches == agent.tree.branches
        for position, record in enumerate(records):
            assert record.request == agent.records[position].request
            for branch in range(len(record.drawn)):
                ids = tree.context_ids(position, branch)
                assert ids.tolist() == agent.tree.context_ids(position, branch).tolist()
        turns = [(record.number, branch) for record in records for branch in range(len(record.drawn))]
        rewards = [SessionReward("x", 1.0, turn) for turn in turns]
        trajectory = build_trajectory(records, ID, SessionEnd.DONE, rewards)
        assert trajectory is not None
        assert len(trajectory.rewards) == agent.tree.num_turns
        for tools, messages in agent.requests:
            request = digest_request(messages, TOOLS[tools])
            assert tree.match(request) == agent.tree.match(request)
            assert request.head == head(messages, TOOLS[tools])


def sampled(node: Node) -> tuple[bytes, bytes, object]:
    return node.token_ids.tobytes(), node.logprobs.tobytes(), node.spans


def plain(record: TurnRecord) -> list[object]:
    """Without arrays, and with what was drawn as its nodes' bytes."""
    fields = [getattr(record, name) for name in TurnRecord.__slots__ if name not in ("inserted_ids", "drawn")]
    drawn = [(each.turns, list(map(sampled, each.nodes))) for each in record.drawn]
    return [*fields, record.inserted_ids.tolist(), drawn]


def path(nodes: Sequence[Node], number: int) -> list[int]:
    if number < 0:
        assert number == NEW_CONVERSATION
        return []
    return path(nodes, nodes[number].parent) + nodes[number].token_ids.tolist()


class Play:
    """A session by hand: each reply is drawn as one token, its context as one a message."""

    def __init__(self) -> None:
        self.tree, self.records = SessionTree(), list[TurnRecord]()

    def ask(
        self, *messages: Message, replies: Sequence[Message] = (YES,), tools: int = 1, empty: bool = False
    ) -> tuple[int, int, int, str]:
        request = digest_request(messages, TOOLS[tools])
        match = self.tree.match(request)
        new = messages[match.num_messages :]
        number = len(self.records)
        ids = [[] if empty else [100 * number + branch + 50] for branch in range(len(replies))]
        self.records.append(
            TurnRecord(
                number=number,
                request=b"body",
                parent=match.parent,
                parent_branch=match.branch,
                head=request.head,
                has_tools=bool(TOOLS[tools]),
                inserted_ids=np.array([100 * number + i for i in range(len(new))], np.int32),
                messages=new,
                cause=match.cause,
                drawn=tuple(builders.sample(builders.sample_id(), builders.node(i), text="yes") for i in ids),
                chains=tuple(digest_request([*messages, r], TOOLS[tools]).chains[-1] for r in replies),
            )
        )
        self.tree.add(self.records[-1])
        return tuple(match)


def test_causes_by_hand() -> None:
    play = Play()
    assert play.ask(SYSTEM, ASK) == (ROOT, 0, 0, "new conversation")
    assert play.ask(SYSTEM, ASK, YES, MORE, replies=[NO, YES]) == (0, 0, 3, "")
    assert play.ask(SYSTEM, ASK, YES, MORE, YES, MORE) == (1, 1, 5, "")
    assert play.ask(SYSTEM, ASK, YES, MORE, NO, MORE) == (1, 0, 5, "")
    assert play.ask(SYSTEM, ASK, YES, MORE) == (0, 0, 3, "resampled")
    assert play.ask(SYSTEM, ASK, YES, MORE, YES, OTHER) == (
        4,
        0,
        5,
        "parallel",
    )  # the latest of equal replies
    assert play.ask(SYSTEM, ASK, YES, MORE, YES, MORE, OTHER) == (4, 0, 5, "edited reply")  # left out
    assert play.ask(SYSTEM, ASK, YES, OTHER) == (0, 0, 3, "parallel")
    assert play.ask(SYSTEM, ASK, NO, MORE) == (ROOT, 0, 0, "edited reply")
    assert play.ask(SYSTEM, OTHER, YES, MORE) == (ROOT, 0, 0, "edited history")
    assert play.ask(SYSTEM, OTHER, MORE) == (ROOT, 0, 0, "restarted")
    assert play.ask(SYSTEM, ASK, YES, MORE, tools=2) == (ROOT, 0, 0, "edited prompt")
    assert play.ask(ASK) == (ROOT, 0, 0, "new conversation")
    assert play.tree.branches == {
        "new conversation": 2,
        "resampled": 1,
        "edited reply": 2,
        "parallel": 2,
        "edited history": 1,
        "restarted": 1,
        "edited prompt": 1,
    }
    assert len(play.tree) == 13


def test_a_trajectory_by_hand() -> None:
    play = Play()
    play.ask(OTHER, tools=0)  # a title
    play.ask(SYSTEM, ASK, replies=[YES, NO])
    play.ask(SYSTEM, ASK, NO, MORE, empty=True)
    play.ask(SYSTEM, ASK, NO, MORE, YES, OTHER)
    play.ask(Message("system", "sub-agent"), ASK, tools=2)
    rewards = [
        SessionReward("solved", 1.0),
        SessionReward("short", 0.5, (1, 1)),
        SessionReward("polite", 0.25, (2, 0)),
    ]
    trajectory = build_trajectory(play.records, ID, SessionEnd.TURNS, rewards)
    assert trajectory is not None
    assert [(node.parent, node.token_ids.tolist()) for node in trajectory.nodes] == [
        (NEW_CONVERSATION, [0]),
        (0, [50]),
        (NEW_CONVERSATION, [100, 101]),
        (2, [150]),
        (2, [151]),
        (4, [200]),
        (5, []),
        (5, [300]),
        (7, [350]),
        (NEW_CONVERSATION, [400, 401]),
        (9, [450]),
    ]
    assert [(t.node, t.number, t.branch, t.untrained) for t in trajectory.turns] == [
        (1, 0, 0, True),
        (3, 1, 0, False),
        (4, 1, 1, False),
        (6, 2, 0, False),
        (8, 3, 0, False),
        (10, 4, 0, True),
    ]
    assert [(r.node, r.value, dict(r.components)) for r in trajectory.rewards] == [
        (WHOLE, 1.0, {"solved": 1.0}),
        (4, 0.5, {"short": 0.5}),
        (WHOLE, 0.25, {"polite": 0.25}),
    ]
    assert (trajectory.id, trajectory.attempt) == (ID.sample, 2)
    assert (trajectory.status, trajectory.reason) == (TrajectoryStatus.TRUNCATED, "turns")
    said = Message("assistant", "yes")  # as the turns' texts are
    assert trajectory.messages == (SYSTEM, ASK, said, MORE, said, OTHER, said)
    assert play.tree.context_ids(3, 0).tolist() == [100, 101, 151, 200, 300, 350]
    assert [ids.tolist() for ids in play.tree.replies(3, 0)] == [[151], [], [350]]
    assert play.tree.replies(ROOT, 0) == []


def test_a_session_without_turns_has_no_trajectory() -> None:
    assert build_trajectory([], ID, SessionEnd.DONE) is None


def test_the_first_conversation_is_the_main_one_if_none_offers_tools() -> None:
    play = Play()
    play.ask(ASK, tools=0)
    play.ask(SYSTEM, ASK, tools=0)
    trajectory = build_trajectory(play.records, ID, SessionEnd.DONE)
    assert trajectory is not None
    assert [turn.untrained for turn in trajectory.turns] == [False, True]
    assert (trajectory.status, trajectory.reason) == (TrajectoryStatus.COMPLETED, "")


def test_equal_requests_share_what_was_inserted() -> None:
    play = Play()
    play.ask(ASK)
    play.ask(ASK)
    play.records[1].inserted_ids[:] = play.records[0].inserted_ids
    trajectory = build_trajectory(play.records, ID, SessionEnd.DONE)
    assert trajectory is not None
    assert [node.parent for node in trajectory.nodes] == [NEW_CONVERSATION, 0, 0]


def test_a_reward_for_an_unknown_turn_is_refused() -> None:
    play = Play()
    play.ask(ASK)
    assert build_trajectory(play.records, ID, SessionEnd.DONE, [SessionReward("x", 1.0, (0, 0))])
    for number, branch in ((0, 1), (1, 0)):
        reward = SessionReward("x", 1.0, (number, branch))
        with pytest.raises(ValueError, match=rf"turn \({number}, {branch}\), expected one of \[\(0, 0\)\]"):
            build_trajectory(play.records, ID, SessionEnd.DONE, [reward])


def call(arguments: str) -> bytes:
    return canonical(Message("assistant", "", (ToolCall("c", "f", arguments),)))


DEEP = '{"a": ' * 900 + "1" + "}" * 900


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DEEP, DEEP + " "),
        ('{"a": 1, "b": {"d": 1, "c": 2}}', '{"b":{"c":2,"d":1},"a":1}'),
        ('{"a": "\\u00e9\\n"}', '{"a": "é\\n"}'),
        ('{"a": 1e2}', '{"a": 100.0}'),
        ('{"a": 0.1}', '{"a": 0.10000000000000000000000}'),
        ('{"a": 123456789012345678901234567890}', '{ "a":123456789012345678901234567890 }'),
        ('{"a": 9223372036854775808}', '{"a":9223372036854775808}'),
        ('{"a": "\\ud800"}', '{"a":"\ud800"}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),  # as every reader of JSON takes it
    ],
)
def test_the_same_arguments(one: str, other: str) -> None:
    assert call(one) == call(other)


def test_arguments_that_differ() -> None:
    texts = ["1", "1.0", "true", '"1"', "null", "[1]", '{"b": 1}', '"\\ud800"', '"\\ufffd"', '"\\\\ud800"']
    texts += [
        "-0.0",
        "0",
        "0.0",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "1e500",
        "1e22",
        "10000000000000000000000",
    ]
    texts += ["9223372036854775807", "9223372036854775808", "-9223372036854775809", "-9223372036854775810"]
    texts += ["18446744073709551615", "18446744073709551616", "18446744073709551617", "1.8446744073709552e19"]
    texts += ["9" * 5000, "9" * 5001, '1e400, "b": 1234567890123456789', 'null, "b": 1234567890123456789']
    whole = [f'{{"a": {text}}}' for text in texts] + [
        "",
        "null",
        "[]",
        "{}",
        '"{}"',
        '{"a": 1',
        "\ud800",
        "\x00",
    ]
    whole += [DEEP, DEEP.replace("1", "2"), '{"a": ' * 5000, "[" * 100_000]
    assert len({call(text) for text in whole}) == len(whole)


def test_no_message_looks_like_another() -> None:
    messages = [
        Message("user", ""),
        Message("assistant", ""),
        Message("user", "a"),
        Message("usera", ""),
        Message("user", "", (), "a"),
        Message("user", "", (ToolCall("", "", ""),)),
        Message("user", "", (ToolCall("", "", "{}"),)),
        Message("user", "", (ToolCall("", "", '"{}"'),)),
        Message("user", "", (ToolCall("", "", ""), ToolCall("", "", ""))),
        Message("user", "", (ToolCall("x", "", ""),)),
        Message("user", "", (ToolCall("", "x", ""),)),
        Message("user", "\ud800"),
        Message("user", "\\ud800"),
        Message("user", '",""'),
    ]
    assert len(set(map(canonical, messages))) == len(messages)
    assert canonical(Message("assistant", "a", (), "", "thoughts")) == canonical(Message("assistant", "a"))


def test_tools_and_the_first_system_messages_are_the_head() -> None:
    late = Message("system", "late")
    assert head([SYSTEM, ASK, late], TOOLS[1]) == head([SYSTEM, OTHER], TOOLS[1])
    heads = [
        head(*each)
        for each in (([SYSTEM], TOOLS[1]), ([SYSTEM], TOOLS[2]), ([], TOOLS[1]), ([SYSTEM, late], TOOLS[1]))
    ]
    assert len(set(heads)) == 4
    assert digest_request([SYSTEM], TOOLS[1]).chains == (heads[0],)
    assert head([], [{"b": 1, "a": 2}]) == head([], [{"a": 2, "b": 1}])
