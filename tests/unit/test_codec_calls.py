"""What is asked of services, and what they say of themselves, survives the wire unchanged."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest

from atoll.config.schema import WeightsSection
from atoll.config.transports import TRANSPORTS
from atoll.wire.codec import agents, fleet, rewards, rollout, trainer, weights
from atoll.wire.info import AgentsInfo, RewardInfo, RolloutInfo, RunStatus, TrainerInfo
from atoll.wire.types import (
    BOX,
    TRANSFER,
    AgentOutcome,
    AgentTask,
    ExternalServer,
    GroupId,
    LoraSpec,
    Membership,
    Message,
    Plan,
    PublishRequest,
    PushPart,
    ReceiverSetup,
    SampleId,
    ServerHealth,
    ServiceEntry,
    SessionId,
    ShardLayout,
    StreamManifest,
    Version,
)

V3 = Version("a3f0", 3)
CATALOG = ShardLayout(("q", "k"), np.array([(0, 0, 4, 0, 2, 1, 6, 2), (1, 4, 1, 0, 9, 0, 0, 9)], BOX))
OTHER = ShardLayout(("q",), np.array([(0, 4, 4, 0, 2, 0, 0, 2)], BOX))
PLAN = Plan("f00d", ("q", "k"), np.array([tuple(range(15))], TRANSFER))
STREAM = StreamManifest(3, "/proc/7/fd/9", 4096, 64, "f00d", 5, 2**64 - 1, True)
TRAINER = TrainerInfo("qwen", 4, 2, 1, 1, 1, 2, 600, 64, "d1", (CATALOG, OTHER, CATALOG, OTHER), ("actor",))
SERVER = ExternalServer(
    "reward", "judge", "http://judge:80", "http", {"batch": "4"}, "env:T", 3, 7.0, "10.0.0.9"
)
SESSION = SessionId(SampleId(GroupId("toy", 0, 7), 1), 2)
ENTRY = ServiceEntry("rollout", "rollout-0", "9f", "10.0.0.1:4711")


def content(value: Any) -> Any:
    """Comparable by ==, arrays with their dtypes, too."""
    if is_dataclass(value):
        return [(field.name, content(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    return [content(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("encode", "decode", "value"),
    [
        (
            rollout.encode_score_tokens,
            rollout.decode_score_tokens,
            [np.array([5, 9, 2], np.int32), np.array([7], np.int32)],
        ),
        (
            rollout.encode_rollout_info,
            rollout.decode_rollout_info,
            RolloutInfo("rollout-0", "9f", V3, 64, 512, 8, "bfloat16", (CATALOG, OTHER), 1, 2, 3, 4),
        ),
        (
            agents.encode_agent_task,
            agents.decode_agent_task,
            AgentTask(
                *(SESSION, "search", "http://gateway:1", "agent-key", "reward-key", "toy"),
                *((Message("user", "1+1="),), "2", "sums", {"level": "3"}),
            ),
        ),
        (agents.encode_agent_outcome, agents.decode_agent_outcome, AgentOutcome()),
        (agents.encode_agent_outcome, agents.decode_agent_outcome, AgentOutcome(reward=0.0)),
        (agents.encode_agent_outcome, agents.decode_agent_outcome, AgentOutcome("ValueError: no")),
        (agents.encode_agents_info, agents.decode_agents_info, AgentsInfo({"search": 64}, 3)),
        (trainer.encode_trainer_info, trainer.decode_trainer_info, TRAINER),
        (
            rewards.encode_reward_info,
            rewards.decode_reward_info,
            RewardInfo(("math", "code"), 4096, "landlock, seccomp, namespaces", 16 << 20),
        ),
        (
            fleet.encode_run_status,
            fleet.decode_run_status,
            RunStatus(
                "toy",
                "training",
                3,
                10,
                4,
                "",
                (ENTRY,),
                {"loss": 0.5},
                7,
                (ServerHealth(SERVER, False, "busy"),),
                12.5,
            ),
        ),
        *(
            (
                weights.encode_push_part,
                weights.decode_push_part,
                PushPart(V3, [STREAM], plan, Membership(4, 3, 2)),
            )
            for plan in (None, PLAN)
        ),
    ],
)
def test_round_trip(encode: Callable[[Any], Any], decode: Callable[[Any], Any], value: Any) -> None:
    message = encode(value)
    assert content(decode(type(message).FromString(message.SerializeToString()))) == content(value)


@pytest.mark.parametrize("lora", [None, LoraSpec(4, 8.5, ("q_proj", "v_proj"))])
def test_receiver_setups_round_trip(lora: LoraSpec | None) -> None:
    setup = ReceiverSetup("shm", 60.0, "host", lora)
    assert weights.decode_attach(weights.encode_attach(V3, setup)) == (V3, setup)


def test_publish_requests_round_trip() -> None:
    members = {"f00d": Membership(4, 3), "beef": Membership(4, 0)}
    request = PublishRequest(V3, "bfloat16", members, [PLAN], 2)
    message = weights.encode_publish("actor", request)
    assert message.role == "actor"
    back = weights.decode_publish(message)
    assert list(back.members.items()) == list(members.items())
    assert content(replace(back, members={})) == content(replace(request, members={}))


def test_checksums_round_trip() -> None:
    sums = {"q": 2**64 - 1, "k": 0}
    assert rollout.decode_checksums(rollout.encode_checksums(V3, sums)) == (V3, sums)


def test_scores_of_tokens_are_cut_by_sequence() -> None:
    sequences = [np.zeros(length, np.int32) for length in (3, 1, 2)]
    logprobs = [np.array(values, np.float32) for values in ([-0.5, -1.25], [], [-2.0])]
    message = rollout.encode_token_scores(logprobs)
    assert content(rollout.decode_token_scores(message, sequences)) == content(logprobs)
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(2,\)"):
        rollout.decode_token_scores(message, sequences[:2])


def test_a_shard_that_ranks_keep_alike_travels_once() -> None:
    ranks = [
        replace(TRAINER, shard_layouts=(ShardLayout(s.tensors, s.boxes.copy()),))
        for s in TRAINER.shard_layouts
    ]
    joined = trainer.join_trainer_infos([trainer.encode_trainer_info(rank) for rank in ranks])
    assert (len(joined.shard_layouts), list(joined.shard_layout_of_rank)) == (2, [0, 1, 0, 1])
    assert content(trainer.decode_trainer_info(joined)) == content(TRAINER)
    assert list(trainer.encode_trainer_info(TRAINER).shard_layout_of_rank) == [0, 1, 0, 1]


def test_every_transport_has_traits() -> None:
    assert {"auto", *TRANSPORTS} == set(get_args(WeightsSection.model_fields["transport"].annotation))
    assert {name for name, traits in TRANSPORTS.items() if traits.stays_readable} == {"shm", "cuda_ipc"}
