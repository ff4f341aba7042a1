"""The `atoll` command. Each subcommand is a module of this folder, imported on demand."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

# The launcher forks while gRPC runs; children do not use gRPC before exec, so fork support is off.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

EXIT_INTERRUPTED = 130

COMMANDS = {
    "quickstart": "build the arithmetic task and train on it (two to three minutes on two cores)",
    "run": "run all services of a run on this machine and show progress",
    "config": "resolve a config file and write it as JSON, for services that are started by hand",
    "status": "show a run's state, services, servers and latest metrics",
    "runs": "list the runs of a folder with state, step, reward and size",
    "compare": "show which settings and results of two runs differ",
    "plot": "plot metrics of runs, in the terminal or as an SVG file",
    "scale": "change the number of rollout replicas of a running run",
    "drain": "have a service finish its work and leave a running run",
    "stop": "stop a running run after the step in progress, with a checkpoint",
    "rm": "delete the folders of runs",
    "register": "add a reward, tool or environment server to a running run",
    "deregister": "remove a registered server from a running run",
    "reload": "reload the user's own graders of a running run",
    "sessions": "show the open sessions of a run's agents, or one of them turn by turn",
    "audit": "show the fate of every sample of a run: trained, dropped, pending, lost",
    "samples": "print prompts, answers and rewards of a step or of a validation",
    "grade": "grade the responses in a file with a grader of your own or a built-in one",
    "plan": "estimate device memory and weight-push time before starting a run",
    "conformance": "test whether a reward, tool or environment server follows its protocol",
    "health": "check that a service answers, for health checks of containers",
    "doctor": "check this machine and say what is missing",
    "data": "build data sets, tokenizers and small models",
    "examples": "copy the example configs, data and graders into a folder",
    "track": "send a run to experiment trackers, after it has ended",
    "export": "convert a checkpoint to a Hugging Face folder",
    "bench": "benchmark the loop, the rollout engine, rewards, the trainer or weight pushes",
    "serve": "run a single service, for manual placement",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted (Ctrl-C, SIGTERM,
    SIGHUP, `atoll stop`); `audit` has a 3.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="atoll", description="Disaggregated reinforcement-learning post-training for language models."
    )
    parser.add_argument("--version", action="version", version=f"atoll {version('atoll')}")
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        parser.error(f"unknown command {argv[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            command = importlib.import_module(f"atoll.cli.{name}")
            command.add_arguments(subparser)
    arguments = parser.parse_args(argv)
    try:
        code: int = command.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # as in `atoll audit RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush would raise
        return 1
    except Exception as error:
        if not (message := _message_for_user(error)):
            raise
        print(f"atoll {arguments.command}: {message}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return code


def _message_for_user(error: Exception) -> str:
    """ "" for a bug, which gets a traceback."""
    from atoll.config.errors import ConfigError  # imported here: `--help` and `doctor` do not need it
    from atoll.runtime.errors import AtollError

    if isinstance(error, OSError) and error.filename:  # a file that is missing, unreadable or in the way
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, ConfigError | AtollError) else ""


if __name__ == "__main__":
    sys.exit(main())
