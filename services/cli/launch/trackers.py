"""The processes that send a run to experiment trackers."""

import sys
from pathlib import Path

from atoll.cli.launch.processes import ServiceCommand, ServiceGroup
from atoll.config.schema import RunConfig, TrackerName

MAX_RESTARTS = 3  # of each tracker's process, in an hour


def tracker_groups(config: RunConfig, coordinator: str) -> list[ServiceGroup]:
    """A process for each tracker; the run continues without it."""
    path, section = config.folder / "config.json", config.tracking
    return [
        ServiceGroup(
            (
                ServiceCommand(
                    f"tracking-{name}",
                    (*tracker_command(path, name, section.python), "--coordinator", coordinator),
                    {"OMP_NUM_THREADS": "1"},
                ),
            ),
            MAX_RESTARTS,
            if_lost=f"the run continues without {name}; afterwards, send the rest with: "
            f"atoll track {config.folder} --to {name}",
        )
        for name in section.to
    ]


def tracker_command(config: Path, name: TrackerName, python: Path | None) -> tuple[str, ...]:
    return (str(python or sys.executable), "-m", "atoll.tracking", "--config", str(config), "--to", name)
