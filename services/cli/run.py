"""`atoll run FILE`: runs all services of a run on this machine until it ends."""

import argparse
import shlex
from pathlib import Path

from atoll.cli.compare import differences, read_settings
from atoll.cli.display import progress
from atoll.cli.display.summary import describe_summary, read_summary
from atoll.cli.launch import active_runs, preflight
from atoll.cli.launch.fork import fork, parse_fork
from atoll.cli.launch.launcher import launch, service_names
from atoll.cli.main import EXIT_INTERRUPTED
from atoll.cli.samples import SamplePrinter
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.coordinator.summary import Outcome
from atoll.runtime.errors import UserError
from atoll.runtime.gpus import resolve_here
from atoll.wire.info import RunStatus

OWN_SETTINGS = ("run.name", "run.dir")  # which a fork must change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run's config in TOML, such as examples/arithmetic.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the run, print its resolved config and exit"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--step", type=int, metavar="N", help="with --resume: from the checkpoint of step N")
    parser.add_argument(
        "--fork-from",
        default="",
        metavar="RUN[@STEP]",
        help="start a new run from a checkpoint of another one; default: its newest",
    )


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.file, arguments.set)
    if arguments.dry_run:
        config = resolve_here(config)
        preflight.require(config, resume=arguments.resume)
        print(config.model_dump_json(indent=2))
        return 0
    overrides = [word for override in arguments.set for word in ("--set", override)]
    again = shlex.join(["atoll", "run", str(arguments.file), *overrides, "--resume"])
    if arguments.step is not None and not arguments.resume:
        raise UserError("--step needs --resume; to keep the run as it is, --fork-from RUN@STEP")
    if arguments.fork_from and arguments.resume:
        raise UserError("--fork-from starts a new run, --resume continues one: give one of them")
    return follow_to_end(
        config, resume=arguments.resume, step=arguments.step, fork_from=arguments.fork_from, again=again
    )


def follow_to_end(
    config: RunConfig, *, resume: bool = False, step: int | None = None, fork_from: str = "", again: str = ""
) -> int:
    """Does what `atoll run` does: checks the run, starts every service here, shows progress until the run
    ends, then its summary.

    `step`: of the checkpoint to resume from; None: the newest. `fork_from`: "RUN" or "RUN@STEP", where this
    new run begins. `again`: the command that resumes it. Returns the exit code: 0, or 130 if it was
    interrupted. Raises UserError if the run cannot start, AtollError if it fails.
    """
    config = resolve_here(config)
    preflight.require(config, resume=resume)
    print(f"run {config.run.name}: files and logs in {config.folder}")
    if fork_from:
        before, at = parse_fork(fork_from)
        print(f"it starts after step {fork(before, at, config.folder)} of {before}")
        show_changes(before, config)
    elif resume and active_runs.is_run(config.folder):
        show_changes(config.folder, config)
    printer = SamplePrinter(config.folder, config.console)
    with progress.view(config.folder, service_names(config)) as show:

        def show_all(status: RunStatus) -> None:
            show(status)
            printer.show(status)

        launch(
            config,
            lambda client: progress.follow(client, show_all),
            resume=resume or bool(fork_from),
            step=step,
        )
    summary = read_summary(config.folder)
    assert summary is not None  # launch leaves one
    print(describe_summary(summary, config.folder, again))
    return EXIT_INTERRUPTED if summary["outcome"] == Outcome.INTERRUPTED else 0


def show_changes(before: Path, config: RunConfig) -> None:
    """Prints which settings are not those of the run in `before`: a --set may have been forgotten."""
    changes = differences(read_settings(before), config.model_dump(mode="json"))
    changes = [change for change in changes if change.setting not in OWN_SETTINGS]
    if changes:
        print("settings that differ from the last start:")
    for change in changes:
        note = " (weights come from the checkpoint)" if change.setting == "model.path" else ""
        print(f"  {change}{note}")
