"""Runs a command and stops random processes below it for a moment, again and again:

    python -m tests.disturb [--seed N] -- make test

Tests must pass beside it: on a busy machine any process may stand still for a second.
"""

import argparse
import random
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

STOP_S = (0.5, 1.5)
PAUSE_S = (1.0, 4.0)  # between two stops


def disturb(command: Sequence[str], dice: random.Random) -> tuple[int, int]:
    """Returns the command's exit code and how many processes were stopped."""
    num_stopped = 0
    with subprocess.Popen(command) as process:
        while not _ended(process, dice.uniform(*PAUSE_S)):
            below = psutil.Process(process.pid).children(recursive=True)
            if below and _stopped(dice.choice(below), process, dice.uniform(*STOP_S)):
                num_stopped += 1
    return process.returncode, num_stopped


def _stopped(victim: psutil.Process, command: subprocess.Popen[bytes], seconds: float) -> bool:
    """False if it was gone, stopped already by a test, or does nothing that could be disturbed: a test of the
    sandbox checks that nobody stops its `sleep`."""
    try:
        if victim.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) or victim.name() == "sleep":
            return False
        victim.send_signal(signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return False
    try:
        _ended(command, seconds)
    finally:
        try:
            victim.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return True  # a test killed it
    return True


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command and stop random processes below it.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    code, num_stopped = disturb(arguments.command, random.Random(arguments.seed))
    print(f"disturb: stopped {num_stopped} processes; the command's exit code is {code}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
