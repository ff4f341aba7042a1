"""Who receives a push together: members with numbers, for as long as they stay the same and none fails."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from atoll.coordinator.fleet.replicas import Replica
from atoll.wire.types import Membership, Plan


@dataclass(frozen=True, slots=True, eq=False)
class EpochMember:
    """A replica's place in an epoch."""

    plan: Plan  # of its class
    membership: Membership


class Epochs:
    """One after the other; what was begun in one that is over is void."""

    def __init__(self, first: int) -> None:
        """`first` is above all that the services may have seen."""
        self.number = first
        self._members: Mapping[Replica, EpochMember] = {}  # none where the epoch is over

    def of(self, plans: Mapping[Replica, Plan]) -> Mapping[Replica, EpochMember]:
        """The members of the epoch that these replicas, with the plan of each, are in, or of a new one. Those
        of one plan are numbered."""
        if plans.keys() != self._members.keys():
            self.number += 1
            sizes = Counter(plan.id for plan in plans.values())
            numbers: dict[str, Iterator[int]] = defaultdict(count)
            self._members = {
                replica: EpochMember(plan, Membership(self.number, sizes[plan.id], next(numbers[plan.id])))
                for replica, plan in plans.items()
            }
        return self._members

    def end(self) -> None:
        """The next one has another number, whoever its members are."""
        self._members = {}
