"""`atoll run FILE`: runs all services of a run on this machine until it ends."""

import argparse
import shlex
from pathlib import Path

from atoll.cli import preflight, progress
from atoll.cli.launcher import launch
from atoll.cli.main import EXIT_INTERRUPTED
from atoll.cli.samples import SamplePrinter
from atoll.cli.summary import describe_summary, read_summary
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.coordinator.summary import Outcome
from atoll.wire.info import RunStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run's config in TOML, such as examples/arithmetic.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the run, print its resolved config and exit"
    )
    parser.add_argument("--resume", action="store_true", help="resume the run in this folder")


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.file, arguments.set)
    if arguments.dry_run:
        preflight.require(config, resume=arguments.resume)
        print(config.model_dump_json(indent=2))
        return 0
    overrides = [word for override in arguments.set for word in ("--set", override)]
    again = shlex.join(["atoll", "run", str(arguments.file), *overrides, "--resume"])
    return follow_to_end(config, resume=arguments.resume, again=again)


def follow_to_end(config: RunConfig, *, resume: bool = False, again: str = "") -> int:
    """Does what `atoll run` does: checks the run, starts every service here, shows progress until the run
    ends, then its summary. `again`: the command that resumes it. Returns the exit code: 0, or 130 if it was
    interrupted. Raises UserError if the run cannot start, AtollError if it fails.
    """
    preflight.require(config, resume=resume)
    print(f"run {config.run.name}: files and logs in {config.folder}")
    printer = SamplePrinter(config.folder, config.console)
    with progress.view() as show:

        def show_all(status: RunStatus) -> None:
            show(status)
            printer.show(status)

        launch(config, lambda client: progress.follow(client, show_all), resume=resume)
    summary = read_summary(config.folder)
    assert summary is not None  # launch leaves one
    print(describe_summary(summary, config.folder, again))
    return EXIT_INTERRUPTED if summary["outcome"] == Outcome.INTERRUPTED else 0
