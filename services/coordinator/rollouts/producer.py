"""The seam between a source of groups and whoever makes them: a source submits groups to a `Producer`, which
reports to the source's `Sink`. `Generation` makes samples of a single turn."""

from collections.abc import Sequence
from typing import Protocol

from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.wire.types import GroupId, SampleId, Trajectory


class Sink(Protocol):
    """Where groups go. A training run journals them, a validation only counts."""

    async def finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        """These samples are generated, not yet graded; `payload` holds them as they came."""
        ...

    async def retried(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def completed(self, group: PendingGroup) -> None: ...

    async def dropped(self, group: PendingGroup, reason: str) -> None: ...


class Producer(Protocol):
    def submit(self, groups: Sequence[PendingGroup], sink: Sink) -> None:
        """Generates and grades whatever the groups lack."""
        ...

    def cancel(self, id: GroupId, reason: str) -> None:
        """Forgets the group, and aborts what is being generated for it."""
        ...

    async def run(self) -> None:
        """Runs until cancelled; an error of any part ends all of it."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Of the time since the last call."""
        ...


class GroupsInFlight:
    """Submitted, and neither complete nor dropped."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, tuple[PendingGroup, Sink]] = {}

    def add(self, group: PendingGroup, sink: Sink) -> None:
        self._groups[group.prompt.id] = group, sink

    def remove(self, id: GroupId) -> None:
        self._groups.pop(id, None)

    def find(self, id: GroupId) -> tuple[PendingGroup, Sink] | None:
        """None: it was cancelled, dropped or completed."""
        return self._groups.get(id)

    def __contains__(self, id: GroupId) -> bool:
        return id in self._groups
