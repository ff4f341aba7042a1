"""How many rollout replicas the launcher of a run is to run."""

from dataclasses import dataclass
from typing import Self

from atoll.config.schema import RunConfig
from atoll.runtime.errors import UserError

BY_HAND = (
    "no launcher runs the services of this run: under Docker Compose, use `docker compose up --detach "
    "--scale rollout=N`; otherwise start `atoll serve rollout`, or end one with `atoll drain NAME`"
)


@dataclass(slots=True)
class Scaling:
    number: int = 0  # that operators want; 0: as the config says
    refusal: str = BY_HAND  # why the number cannot be changed; "": it can
    limit: int | None = None  # by the GPUs in the config; None: no limit

    @classmethod
    def of(cls, config: RunConfig, *, has_launcher: bool) -> Self:
        placed = config.placement.gpus.replicas
        refusal = ""
        if not config.num_replicas:
            refusal = f'a run of mode "{config.run.mode}" has no rollout replicas'
        elif not has_launcher:
            refusal = BY_HAND
        elif any(gpu.host for gpus in placed for gpu in gpus):
            refusal = (
                "the replicas of this run are on several hosts, where no launcher starts them: start "
                "`atoll serve rollout` there, or end one with `atoll drain NAME`"
            )
        return cls(refusal=refusal, limit=len(placed) if config.rollout.device == "cuda" else None)

    def change(self, role: str, number: int) -> None:
        """Raises UserError if the launcher cannot run `number` services of `role`."""
        if role != "rollout":
            raise UserError(f"got the role {role!r}, expected rollout: other services cannot be scaled")
        if self.refusal:
            raise UserError(self.refusal)
        if number < 1:
            raise UserError(f"got {number} replicas, expected at least 1; `atoll stop` ends the run")
        if self.limit is not None and number > self.limit:
            raise UserError(
                f"got {number} replicas, expected at most {self.limit}: placement.gpus.rollout has GPUs for "
                f"{self.limit}; add GPUs there, then stop the run and continue it with --resume"
            )
        self.number = number
