"""Epochs of a push: numbered members, which stay the same until one leaves or fails."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from atoll.coordinator.fleet.replicas import Replica
from atoll.wire.types import Membership, Plan


@dataclass(frozen=True, slots=True, eq=False)
class EpochMember:
    """A replica's membership in an epoch."""

    plan: Plan  # of its class
    membership: Membership


class Epochs:
    """Successive epochs; whatever began in an earlier epoch is void."""

    def __init__(self, first: int) -> None:
        """`first` is above all epochs that services may have seen."""
        self.number = first
        self._members: Mapping[Replica, EpochMember] = {}  # none if the epoch is over

    def of(self, plans: Mapping[Replica, Plan]) -> Mapping[Replica, EpochMember]:
        """The members of the current epoch if it has these replicas, otherwise of a new one. Members of one
        plan are numbered.
        """
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
        """Ends the epoch: the next one gets a new number, even with the same members."""
        self._members = {}
