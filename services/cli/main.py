"""The `atoll` command. Each subcommand is a module of this folder, imported only when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# The launcher starts processes while gRPC runs; none of them uses gRPC before exec, so it need not mind.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

EXIT_INTERRUPTED = 130

COMMANDS = {
    "quickstart": "make the arithmetic task and train on it (two to three minutes on two cores)",
    "run": "start every service of a run on this machine and follow it",
    "status": "show a run's state, services, servers and last metrics",
    "register": "let someone else's reward, tool or environment server join a running run",
    "deregister": "take a registered server out of a running run",
    "reload": "let a running run import its own graders anew from their files",
    "audit": "say what became of every sample of a run: trained, dropped, pending, lost",
    "plan": "say before a start what a run takes on its devices, and how long a weight push lasts",
    "conformance": "test whether a reward, tool or environment server keeps its protocol",
    "doctor": "check this machine and say what is missing",
    "data": "make data sets, tokenizers and small models",
    "export": "turn a checkpoint into a Hugging Face folder",
    "bench": "measure the loop, the rollout engine, rewards, the trainer or the weight push",
    "serve": "run one service here, for those who place services by hand",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted; `audit` has a 3."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="atoll", description="Disaggregated reinforcement-learning post-training for language models."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            command = importlib.import_module(f"atoll.cli.{name}")
            command.add_arguments(subparser)
    arguments = parser.parse_args(argv)
    try:
        code: int = command.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        print(f"atoll {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return code


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message says all; anything else is a defect and deserves its traceback."""
    from atoll.config.errors import ConfigError  # here, since `--help` and `doctor` do without
    from atoll.runtime.errors import AtollError

    return isinstance(error, ConfigError | AtollError)


if __name__ == "__main__":
    sys.exit(main())
