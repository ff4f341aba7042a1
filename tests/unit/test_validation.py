"""Validation sets: what counts, and what happens to a set of which nothing can be graded."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupSink
from atoll.coordinator.validation import ValidationSet, evaluate
from atoll.runtime.errors import AtollError
from atoll.wire.types import Graded, Group
from tests.builders import SAMPLING, node, prompt, sample

SUMS = ValidationSet("sums", (prompt(0), prompt(1), prompt(2)), 2, SAMPLING)


class Generation:
    """Sample 0 of each prompt scores 0, sample 1 its prompt's number; groups of `broken` are dropped."""

    def __init__(self, *broken: int) -> None:
        self._broken = broken
        self._tasks: list[asyncio.Task[None]] = []

    def submit(self, groups: Sequence[PendingGroup], sink: GroupSink) -> None:
        self._tasks += [asyncio.create_task(self._generate(group, sink)) for group in groups]

    async def _generate(self, group: PendingGroup, sink: GroupSink) -> None:
        if group.prompt.id.prompt in self._broken:
            await sink.on_dropped(group, "reward mine.py:broken: ZeroDivisionError")
            return
        for id in group.ids():
            group.accept(sample(id, node([3, 4])))
            group.grade(Graded(id, float(id.index * id.group.prompt), {}))
        await sink.on_completed(group)


async def test_a_group_that_cannot_be_graded_is_left_out_and_counted() -> None:
    assert await evaluate([SUMS], Generation(2), "toy", version=4) == {
        "val/sums/avg@2": 0.25,  # of 0, 0, 0 and 1
        "val/sums/pass@2": 0.5,
        "val/sums/response_length/mean": 2.0,
        "val/sums/dropped": 1.0,
    }


async def test_the_answers_are_kept_in_the_order_of_their_rows() -> None:
    kept: dict[str, list[tuple[str, list[float]]]] = {}

    async def keep(name: str, groups: Sequence[Group]) -> None:
        kept[name] = [(str(group.prompt.id), [sample.score for sample in group.samples]) for group in groups]

    backwards = replace(SUMS, prompts=SUMS.prompts[::-1])
    await evaluate([backwards], Generation(0), "toy", 4, keep)
    assert kept == {"sums": [("toy/val/sums/4/1", [0.0, 1.0]), ("toy/val/sums/4/2", [0.0, 2.0])]}


async def test_a_set_of_which_nothing_can_be_graded_is_an_error() -> None:
    with pytest.raises(AtollError, match=r"set sums: all 3 groups were dropped, .*ZeroDivisionError; fix"):
        await evaluate([SUMS], Generation(0, 1, 2), "toy", version=4)


async def test_the_score_from_which_a_sample_passes() -> None:
    """Of 0, 0, 0 and 1: with partial credit, pass@k at the default could be below avg@k."""
    metrics = await evaluate([replace(SUMS, pass_score=1.5)], Generation(2), "toy", version=4)
    assert metrics["val/sums/pass@2"] == 0.0 < metrics["val/sums/avg@2"]
    metrics = await evaluate([replace(SUMS, pass_score=0.0)], Generation(2), "toy", version=4)
    assert metrics["val/sums/pass@2"] == 1.0
