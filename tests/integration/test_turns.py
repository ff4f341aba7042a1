"""Trajectories of several turns and branches through real services: the local engine, a reward service, and
trainers of one and two ranks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from atoll.config.schema import GraderConfig, ParallelConfig
from atoll.coordinator.algorithm.experience import lay_out, loss_weights
from atoll.rollout.service import RolloutService
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.server import Server
from atoll.runtime.trajectory import extend
from atoll.wire.types import (
    WHOLE,
    Graded,
    Group,
    Message,
    Node,
    PolicyBatch,
    SampleId,
    Sampling,
    ScoreItem,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnRequest,
    TurnReward,
)
from tests.builders import prompt, sample_id
from tests.integration.test_reward_service import grading
from tests.integration.test_rollout_service import start_engine
from tests.tokens import CALLER, TOKEN
from tests.trainer_fleet import TEMPERATURE, fleet, key

PROMPT = [7, 30, 12, 9, 41]
TOOL, SUMMARY, SUB_AGENT = [5, 17, 17], [40, 2, 2, 6], [3, 3, 8]
SAMPLING = Sampling(6, temperature=TEMPERATURE)


@dataclass
class Episode:
    """One trajectory on its way, as a gateway would extend it."""

    client: RolloutClient
    id: SampleId
    nodes: tuple[Node, ...] = ()
    turns: tuple[Turn, ...] = ()
    responses: list[list[int]] = field(default_factory=list)

    async def ask(self, *context: int) -> int:
        """One more turn; the node that it produced."""
        id = TurnId(self.id, 0, turn=len(self.turns))
        request = TurnRequest((id,), np.array(context, np.int32), SAMPLING, session=str(self.id))
        arrivals = [arrival async for arrival in self.client.generate("actor", [request])]
        (answer,) = arrivals[0].samples
        (drawn,), (turn,) = answer.nodes, answer.turns
        self.nodes, number = extend(
            self.nodes,
            np.array(PROMPT, np.int32),
            request.context_ids,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            spans=drawn.spans,
        )
        self.turns = (*self.turns, turn._replace(node=number))
        self.responses.append(drawn.token_ids.tolist())
        return number

    def end(self, *rewards: TurnReward, messages: tuple[Message, ...] = ()) -> Trajectory:
        status = TrajectoryStatus.COMPLETED
        return Trajectory(self.id, 0, self.nodes, self.turns, status, rewards, messages=messages)


@asynccontextmanager
async def rollouts(model: Path) -> AsyncIterator[RolloutClient]:
    service = RolloutService(start_engine(model), "rollout-0", "a1")
    server = await Server.start(
        "atoll.v1.Rollout", service.add_to, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    client = RolloutClient(server.address, CALLER, timeout_s=30)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)
        await service.close()


async def two_turns(client: RolloutClient) -> Trajectory:
    """The policy calls a tool, reads the answer and answers; only what is new is computed."""
    episode = Episode(client, sample_id(7, 0))
    before = (await client.info()).tokens_prefilled
    first = await episode.ask(*PROMPT)
    assert (await client.info()).tokens_prefilled - before == len(PROMPT)
    before = (await client.info()).tokens_prefilled
    second = await episode.ask(*PROMPT, *episode.responses[0], *TOOL)
    assert (await client.info()).tokens_prefilled - before == 1 + len(
        TOOL
    )  # nothing had read the last drawn token
    assert [node.parent for node in episode.nodes] == [-1, first, second - 1]
    messages = (Message("assistant", "a call"), Message("tool", "3"), Message("assistant", "an answer"))
    return episode.end(TurnReward(first, 0.25, {"tool": 0.25}), messages=messages)


async def branching(client: RolloutClient) -> Trajectory:
    """A retry of the first turn, a branch after a summary, and a sub-agent's conversation."""
    episode = Episode(client, sample_id(7, 1))
    await episode.ask(*PROMPT)
    await episode.ask(*PROMPT)
    assert episode.responses[0] != episode.responses[1]  # each turn draws its own numbers
    await episode.ask(*PROMPT, *episode.responses[1], *TOOL)
    await episode.ask(*PROMPT, *SUMMARY)
    await episode.ask(*SUB_AGENT)
    assert [node.parent for node in episode.nodes] == [-1, -1, 1, 2, -1, 4, -2, 6]
    return episode.end(TurnReward(3, -0.5, {"tool": -0.5}))


async def graded(trajectory: Trajectory) -> Trajectory:
    """With the verdict of a real reward service beside what its environment gave."""
    item = ScoreItem(
        trajectory.id,
        response=trajectory.text,
        ground_truth=trajectory.text,
        response_length=trajectory.num_produced,
        messages=trajectory.messages,
    )
    async with grading(GraderConfig.model_validate({"name": "exact_match"})) as client:
        (verdict,) = await client.score([item])
    assert isinstance(verdict, Graded)
    return trajectory.add_reward(TurnReward(WHOLE, verdict.value, verdict.components))


@pytest.mark.parametrize("data", [1, 2])
async def test_turns_and_branches_train_on_what_was_drawn(
    tiny_qwen2: Path, tmp_path: Path, data: int
) -> None:
    async with rollouts(tiny_qwen2) as client:
        samples = [await two_turns(client), await branching(client)]
    samples = [await graded(sample) for sample in samples]
    assert [sample.score for sample in samples] == [1.25, 0.5]
    # two groups: what two ranks have to share
    groups = [
        Group(prompt(number, PROMPT), tuple(s._replace(id=sample_id(number, s.id.index)) for s in samples))
        for number in (7, 8)
    ]
    layout = lay_out(groups)
    produced = sum(sample.num_produced for group in groups for sample in group.samples)
    assert layout.lengths.sum() == produced
    weights_T = loss_weights(
        layout.loss_mask_T, layout.sample_T, np.ones(layout.num_samples), "seq_mean_token_mean", 8
    )
    with fleet(tmp_path, tiny_qwen2, ParallelConfig(data=data)) as running:
        trainer = TrainerClient(running.address, CALLER, timeout_s=60, role="actor")
        logprobs_T = await trainer.compute_logprobs(layout.segments)
        metrics = await trainer.forward_backward(
            key(0),
            PolicyBatch(
                layout.segments,
                layout.sample_T,
                weights_T,
                layout.place(np.ones(produced)),
                layout.rollout_logprobs_T,
                old_logprobs=None,
                ref_logprobs=None,
            ),
        )
        await trainer.close()
    np.testing.assert_allclose(
        logprobs_T[layout.trained], layout.rollout_logprobs_T[layout.trained], atol=1e-4
    )
    assert metrics["actor/ratio"] == 1
    assert metrics["actor/num_tokens"] == produced
