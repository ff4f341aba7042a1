"""`atoll export`: converts a checkpoint to a Hugging Face folder, with a trainer fleet started for it."""

import argparse
import asyncio
from pathlib import Path

from atoll.cli.launch import active_runs
from atoll.cli.launch.launcher import trainer_group
from atoll.cli.launch.processes import Fleet
from atoll.cli.launch.supervision import first_of
from atoll.cli.launch.tokens import Tokens
from atoll.config.load import read_resolved
from atoll.config.schema import RunConfig
from atoll.coordinator.journal.checkpoints import ACTOR, Checkpoints
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import UserError

FENCE = 1  # this fleet has no coordinator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=active_runs.run_folder,
        metavar="RUN|CHECKPOINT",
        help="a run's name or folder, or one of its checkpoints",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to create")


def run(arguments: argparse.Namespace) -> int:
    checkpoint = find_newest_checkpoint(arguments.source.resolve())
    if arguments.out.exists():
        raise UserError(
            f"{arguments.out} exists: give a folder that does not, so that nothing is overwritten"
        )
    config = read_resolved(checkpoint.parents[1] / "config.json")
    asyncio.run(export(config, checkpoint / ACTOR, arguments.out.absolute()))
    print(f"{checkpoint} -> {arguments.out}")
    return 0


def find_newest_checkpoint(source: Path) -> Path:
    """`source` itself if it is a checkpoint, else the run's newest one. Raises UserError."""
    if (source / ACTOR).is_dir():
        return source
    checkpoints = Checkpoints(source / "checkpoints", keep=1)
    if not checkpoints.steps():
        raise UserError(f"{source} is neither a checkpoint (a folder with {ACTOR}/) nor a run that has one")
    return checkpoints.path(checkpoints.steps()[-1])


async def export(config: RunConfig, weights: Path, out: Path) -> None:
    """Starts the run's trainer ranks, loads `weights`, writes `out`, and stops them."""
    ranks, tokens = trainer_group(config, ACTOR, "--export", str(out)), Tokens.of_this_run()
    async with Fleet(config.folder / "logs" / "export", tokens.environment) as fleet:
        client = TrainerClient(await fleet.start(ranks), Caller(fence=FENCE, token=tokens.run))

        async def work() -> None:
            try:
                await client.load_checkpoint(weights)
                await client.export_hf(out)
            finally:
                await client.close()

        await first_of(fleet.watch(ranks), work())
