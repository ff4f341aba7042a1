"""Pytest that runs certain failed tests once more: `python -m tests.rerun PYTEST_ARGUMENTS`.

In CI, where UNSTABLE names a file, a failed test that is marked `rerun_once` gets a second chance in a
process of its own. If it passes then, its id goes to that file, which `.ci/run` prints at its end. Without
UNSTABLE, or if any other test failed, this is pytest and no more.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


class Failures:
    """Which tests failed, and which of them may be run again."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._may_run_again: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._may_run_again = {item.nodeid for item in items if item.get_closest_marker("rerun_once")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    @property
    def all_may_run_again(self) -> bool:
        return bool(self.failed) and self._may_run_again.issuperset(self.failed)


def run(arguments: Sequence[str], unstable: Path | None) -> int:
    """Returns pytest's exit code, or that of the second run."""
    failures = Failures()
    code = pytest.main([*arguments], plugins=[failures])
    if unstable is None or code != pytest.ExitCode.TESTS_FAILED or not failures.all_may_run_again:
        return int(code)
    print(f"once more: {', '.join(failures.failed)}", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-v", *failures.failed]).returncode
    if again == pytest.ExitCode.OK:
        with unstable.open("a") as file:
            file.writelines(f"{test}\n" for test in failures.failed)
    return again


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], Path(os.environ["UNSTABLE"]) if "UNSTABLE" in os.environ else None))
