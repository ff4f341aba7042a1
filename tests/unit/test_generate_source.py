"""What ends a run that drops or filters too much, over restarts; a filter that takes its time."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.config.schema import FilterConfig
from atoll.coordinator.algorithm.filters import Counters, DynamicSampling
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.group_sources import GenerateSource
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.errors import AtollError
from atoll.wire.types import Graded, Prompt, SampleId, Trajectory, Version
from tests.builders import SAMPLING, V0, node, prompt, sample


class Prompts:
    """Numbers them from 0."""

    def __init__(self) -> None:
        self.drawn = 0
        self.cursor = self

    def dump(self) -> str:
        return str(self.drawn)

    def draw(self, n: int) -> list[Prompt]:
        self.drawn += n
        return [prompt(number) for number in range(self.drawn - n, self.drawn)]


class Journal:
    full = False

    def __init__(self) -> None:
        self.dropped: list[tuple[SampleId, str, int | None]] = []
        self.issued: list[tuple[int, str]] = []  # samples, and the cursor after them

    async def issue(self, samples: Sequence[SampleId], cursor: str) -> None:
        self.issued.append((len(samples), cursor))

    async def consume(self, step: int, samples: Sequence[SampleId]) -> None: ...

    async def load(self, groups: Sequence[Any]) -> list[Any]:
        return []

    async def retry(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def open(self, sessions: Sequence[OpenSession]) -> list[OpenSession]:
        return list(sessions)

    async def drop(self, samples: Sequence[SampleId], reason: str, step: int | None = None) -> None:
        self.dropped += [(sample, reason, step) for sample in samples]


class Agents(Prompts):
    """Rows that an agent gets."""

    def draw(self, n: int) -> list[Prompt]:
        return [replace(drawn, agent="toy") for drawn in super().draw(n)]


class Generation:
    """Generates what it is told to."""

    def __init__(self) -> None:
        self.groups: list[PendingGroup] = []
        self.cuts: list[list[int]] = []  # prompts, by call

    def cut(self, groups: Sequence[PendingGroup]) -> None:
        self.cuts.append([group.prompt.id.prompt for group in groups])

    def submit(self, groups: Sequence[PendingGroup], sink: GenerateSource) -> None:
        self.groups += groups


def source(prompts: Prompts | None = None, **changes: Any) -> tuple[GenerateSource, Generation, Journal]:
    """Four groups of two in a step, all of which are issued at once."""
    generation, journal = Generation(), Journal()
    settings: dict[str, Any] = {
        "sampling": SAMPLING,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "greedy_baseline": False,
        "max_staleness": 0,
        "weighs_turns": False,
        "cuts_sessions": False,
        "steps": 100,
        "max_dropped_share": 0.5,
        "dynamic_sampling": None,
    }
    return (
        GenerateSource(prompts or Prompts(), generation, journal, **(settings | changes)),
        generation,
        journal,
    )


def graded(group: PendingGroup, *scores: float) -> PendingGroup:
    for id, score in zip(group.ids(), scores, strict=True):
        group.accept(sample(id, node([3])))
        group.grade(Graded(id, score, {"exact_match": score}))
    return group


async def test_a_large_step_is_issued_in_parts_each_with_its_cursor() -> None:
    """One call of the store for 800,000 samples took longer than its 10 s."""
    large, generation, journal = source(prompts_per_step=12_000)
    await large.admit()
    assert journal.issued == [(10_000, "5000"), (10_000, "10000"), (4_000, "12000")]
    assert [group.order for group in generation.groups] == list(range(12_000))
    huge, _, journal = source(samples_per_prompt=10_001)
    await huge.admit()
    assert journal.issued == [(10_001, str(number)) for number in (1, 2, 3, 4)]


async def test_the_share_of_dropped_groups_is_judged_over_restarts() -> None:
    first, generation, _ = source()
    await first.on_published(V0)
    for group in generation.groups[:3]:
        await first.on_dropped(group, "reward service: away")
    carried = first.counters
    assert carried == Counters(issued=7, failed=3)
    second, generation, _ = source()
    second.restore([], V0, carried)
    await second.on_published(V0)
    for group in generation.groups[:3]:
        await second.on_dropped(group, "reward service: away")
    assert second.counters == Counters(issued=14, failed=6)
    await second.on_dropped(generation.groups[3], "reward service: away")  # 7 of 14 are allowed
    waiting = asyncio.create_task(second.take(1, 4, V0))
    await asyncio.sleep(0)
    await second.on_dropped(generation.groups[4], "reward service: away")
    with pytest.raises(AtollError, match=r"8 of 15 groups were dropped, .*max_dropped_share = 0.5"):
        await waiting
    assert second.counters == Counters()  # a resume, after the cause was fixed, is judged anew


async def test_a_step_judges_each_group_once_as_it_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[PendingGroup] = []
    stale = PendingGroup.stale_indices
    monkeypatch.setattr(
        PendingGroup, "stale_indices", lambda self, *args: judged.append(self) or stale(self, *args)
    )
    flow, generation, _ = source(prompts_per_step=64)
    await flow.on_published(V0)
    taking = asyncio.create_task(flow.take(1, 64, V0))
    for group in list(generation.groups):
        await asyncio.sleep(0)  # `take` wakes up for every one
        await flow.on_completed(graded(group, 0.0, 1.0))
    groups = await taking
    assert [group.prompt.id for group in groups] == [group.prompt.id for group in generation.groups]
    assert judged == generation.groups


async def test_a_turn_that_is_too_old_replaces_its_sample_or_has_no_weight() -> None:
    def turns(id: SampleId, *versions: int) -> Trajectory:
        return sample(
            id, *(node([3], parent=i - 1, versions=Version("l", v)) for i, v in enumerate(versions))
        )

    for weighs_turns, replaced in ((False, [(0, 0), (0, 1)]), (True, [(0, 1)])):
        flow, generation, _ = source(max_staleness=1, weighs_turns=weighs_turns, prompts_per_step=2, steps=1)
        await flow.on_published(V0)
        for number, group in enumerate(list(generation.groups)):
            for id in group.ids():
                group.accept(turns(id, 1, 2 - id.index) if number == 0 else turns(id, 2))
                group.grade(Graded(id, float(id.index), {"exact_match": float(id.index)}))
            await flow.on_completed(group)
        issued, current = len(generation.groups), Version("l", 3)
        taking = asyncio.create_task(flow.take(1, 2, current))
        await asyncio.sleep(0)
        (again,) = generation.groups[issued:]
        assert [(again.prompt.id.prompt, index) for index in again.missing] == replaced
        for index in again.missing:
            again.accept(turns(again.ids()[index], 3))
            again.grade(Graded(again.ids()[index], 1.0, {"exact_match": 1.0}))
        await flow.on_completed(again)
        taken = await taking
        assert [s.turn_numbers() for s in taken[0].samples] == ([[1, 2], [3]] if weighs_turns else [[3], [3]])
        assert flow.oldest_trained(current) == (2 if weighs_turns else 0)


@pytest.mark.parametrize(
    ("on_age", "waits", "cuts"),
    [("wait", True, []), ("cut", True, [[0], [0], [0]]), ("weigh", False, [])],
)
async def test_a_session_about_to_be_too_old_is_waited_for_or_cut_or_weighed(
    on_age: str, waits: bool, cuts: list[list[int]]
) -> None:
    """Row 0's session has a turn of version 1, row 1's none before version 2; at 2 a turn may be of 1."""
    flow, generation, _ = source(
        Agents(),
        prompts_per_step=1,
        samples_per_prompt=1,
        max_staleness=1,
        steps=2,
        weighs_turns=on_age == "weigh",
        cuts_sessions=on_age == "cut",
    )
    await flow.on_published(Version("l", 1))
    old, fresh = generation.groups
    for group, number in ((old, 1), (fresh, 2)):
        assert group.note_session(0, 0, Version("l", number))
        await flow.on_session(OpenSession(group.ids()[0], 0, Version("l", number)))
    taking = asyncio.create_task(flow.take(1, 1, Version("l", 2)))
    await asyncio.sleep(0)
    await flow.on_session(OpenSession(old.ids()[0], 0, Version("l", 2)))  # its second turn
    await asyncio.sleep(0)
    fresh.accept(sample(fresh.ids()[0], node([3], versions=Version("l", 2))))
    fresh.grade(Graded(fresh.ids()[0], 1.0, {}))
    await flow.on_completed(fresh)
    for _ in range(3):
        await asyncio.sleep(0)
    assert taking.done() is not waits
    assert generation.cuts == cuts
    if waits:
        turns = [node([3], parent=i - 1, versions=Version("l", 1 + i)) for i in range(2)]
        old.accept(sample(old.ids()[0], *turns))
        old.grade(Graded(old.ids()[0], 1.0, {}))
        await flow.on_completed(old)
    taken = await taking
    assert [group.prompt.id.prompt for group in taken] == [0 if waits else 1]


async def test_what_a_trainer_refused_counts_as_dropped() -> None:
    flow, generation, journal = source()
    await flow.on_published(V0)
    for group in list(generation.groups):
        await flow.on_completed(graded(group, 0.0, 1.0))
    taken = await flow.take(1, 4, V0)
    ids = [id for group in taken[:2] for id in group.ids()]
    await flow.on_refused(1, ids, "refused by the trainer: actor: NaN")
    assert journal.dropped == [(id, "refused by the trainer: actor: NaN", 1) for id in ids]
    assert flow.counters == Counters(issued=4, failed=2)


async def test_the_bound_on_refill_is_judged_over_restarts() -> None:
    def sampling() -> DynamicSampling:
        return DynamicSampling(FilterConfig(name="scores_differ", max_refill=1), 4)

    first, generation, _ = source(dynamic_sampling=sampling())
    await first.on_published(V0)
    for group in list(generation.groups[:3]):
        await first.on_completed(graded(group, 1.0, 1.0))
    assert first.counters == Counters(issued=7, filtered=3)
    second, generation, _ = source(dynamic_sampling=sampling())
    second.restore([], V0, first.counters)
    await second.on_published(V0)
    for group in list(generation.groups[:2]):
        await second.on_completed(graded(group, 1.0, 1.0))
    with pytest.raises(AtollError, match="'scores_differ' left out 5 of the 5 groups"):
        await second.take(1, 4, V0)
    assert second.counters == Counters()


SLOW = """
from pathlib import Path

def slow(group, *, folder):
    Path(folder, "begun").write_text("")  # until somebody reads it
    Path(folder, "go").read_text()
    return True
"""


async def test_a_filter_that_takes_its_time_holds_up_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "filters.py").write_text(SLOW)
    for pipe in ("begun", "go"):
        os.mkfifo(tmp_path / pipe)
    config = FilterConfig(name=f"{tmp_path / 'filters.py'}:slow", folder=str(tmp_path))
    flow, generation, _ = source(dynamic_sampling=DynamicSampling(config, 4))
    await flow.on_published(V0)
    judging = asyncio.create_task(flow.on_completed(graded(generation.groups[0], 0.0, 1.0)))
    await asyncio.to_thread((tmp_path / "begun").read_text)
    await flow.admit()
    assert len(generation.groups) == 4  # a group that is being judged takes its room
    await asyncio.to_thread((tmp_path / "go").write_text, "")
    await judging
