"""The trainer side of weight pushes."""

from collections.abc import Mapping, Sequence

from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import AtollError
from atoll.wire.types import Membership, Plan, PublishedPart, PublishRequest, Version


class TrainerEnd:
    """One incarnation of the trainer; plans are sent to it once."""

    def __init__(self, client: TrainerClient, dtype: str) -> None:
        """`dtype`: the replicas' serving dtype."""
        self.client = client
        self._dtype = dtype
        self._has: set[str] = set()  # ids of plans

    async def publish(
        self, version: Version, plans: Sequence[Plan], members: Mapping[str, Membership], part: int
    ) -> PublishedPart:
        """Publishes a part of the version to the members of each plan."""
        new = [plan for plan in plans if plan.id not in self._has]
        try:
            published = await self.client.publish_weights(
                PublishRequest(version, self._dtype, members, new, part)
            )
        except AtollError:
            self._has.clear()  # it may be a new process
            raise
        self._has |= {plan.id for plan in new}
        return published
