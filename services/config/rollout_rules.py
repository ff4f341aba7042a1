"""What settings ask of [rollout]. See rules.py."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.config.schema import RunConfig


def _the_engine_reads_its_table(config: "RunConfig") -> str | None:
    rollout = config.rollout
    table = rollout.local if rollout.engine == "sglang" else rollout.sglang
    if table == type(table)():
        return None
    name = "local" if rollout.engine == "sglang" else "sglang"
    return (
        f'[rollout.{name}] is read by rollout.engine = "{name}", and this run has "{rollout.engine}": '
        "take the table out, or set the engine"
    )


RULES: tuple[Callable[["RunConfig"], str | None], ...] = (_the_engine_reads_its_table,)
