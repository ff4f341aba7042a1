"""The processes that send a run to experiment trackers."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.processes import ServiceCommand, ServiceGroup
from atoll.config.schema import RunConfig, TrackerName
from atoll.runtime.errors import UserError

MAX_RESTARTS = 3  # of each tracker's process, in an hour
# A folder of a package's name, such as wandb's own files, is found but has no origin.
_FIND = (
    "import sys; from importlib.util import find_spec\n"
    "for name in sys.argv[1:]:\n"
    "    if (spec := find_spec(name)) is None or spec.origin is None: print(name)"
)


def check_packages(names: Sequence[TrackerName], python: Path | None) -> None:
    """Raises UserError if a tracker's package is not installed where its process runs."""
    if not names:
        return
    interpreter = str(python or sys.executable)
    found = subprocess.run([interpreter, "-c", _FIND, "atoll", *names], stdout=subprocess.PIPE, text=True)
    if missing := found.stdout.split():
        raise UserError(
            f"tracking.to = {list(names)}: {', '.join(missing)} not installed for {interpreter}: "
            f"pip install 'atoll[{','.join(names)}]'"
        )


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
