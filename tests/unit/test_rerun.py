"""CI's second chance for long tests of real processes, and the list of those that needed it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
from pathlib import Path
import pytest

def passes_the_second_time():
    ran = Path("ran")
    has_run = ran.exists()
    ran.touch()
    assert has_run

@pytest.fixture(scope="module")
def broken_at_first():
    passes_the_second_time()

@pytest.mark.rerun_once
def test_flaky_test():
    passes_the_second_time()

@pytest.mark.rerun_once
def test_flaky_fixture(broken_at_first):
    pass

@pytest.mark.rerun_once
def test_broken():
    assert False

def test_never_run_again():
    passes_the_second_time()

def test_fine():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = rerun_once\n")
    return tmp_path


def rerun(folder: Path, choice: str, *, ci: bool = True) -> tuple[int, list[str]]:
    """Exit code, and the tests that are listed as unstable."""
    listed = folder / "unstable"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("UNSTABLE", None)
    if ci:
        environment["UNSTABLE"] = str(listed)
    command = [sys.executable, "-m", "tests.rerun", "-q", "-k", choice]
    code = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60).returncode
    return code, listed.read_text().splitlines() if listed.exists() else []


@pytest.mark.parametrize("name", ["test_flaky_test", "test_flaky_fixture"])
def test_a_marked_test_that_passes_the_second_time_is_listed(folder: Path, name: str) -> None:
    assert rerun(folder, f"{name} or test_fine") == (0, [f"test_it.py::{name}"])


def test_a_marked_test_that_fails_twice_fails(folder: Path) -> None:
    assert rerun(folder, "test_broken or test_fine") == (1, [])


def test_a_test_without_the_mark_is_not_run_again(folder: Path) -> None:
    assert rerun(folder, "test_never_run_again") == (1, [])
    (folder / "ran").unlink()
    assert rerun(folder, "test_never_run_again or test_broken") == (1, [])


def test_nothing_is_run_again_outside_ci(folder: Path) -> None:
    assert rerun(folder, "test_flaky_test", ci=False) == (1, [])


def test_without_a_failure_nothing_is_listed(folder: Path) -> None:
    assert rerun(folder, "test_fine") == (0, [])


def ci(folder: Path, unstable: int, make_fails: bool = False) -> tuple[int, list[str]]:
    """Exit code and last lines of `.ci/run` with a `make` that lists so many tests as unstable."""
    make = folder / "make"
    names = "".join(f"tests/test_{number}.py\\n" for number in range(unstable))
    make.write_text(f"#!/bin/sh\n[ $1 = test ] || printf '{names}' >>$UNSTABLE\nexit {int(make_fails)}\n")
    make.chmod(0o755)
    answer = subprocess.run(
        [ROOT / ".ci/run"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [path.name for path in folder.iterdir()] == ["make"]
    return answer.returncode, [line for line in answer.stdout.splitlines() if not line.startswith("==")]


def test_ci_ends_with_the_list_of_unstable_tests(tmp_path: Path) -> None:
    assert ci(tmp_path, 0) == (0, [])
    assert ci(tmp_path, 2) == (0, ["unstable: tests/test_0.py", "unstable: tests/test_1.py"])


def test_more_than_two_unstable_tests_fail_ci(tmp_path: Path) -> None:
    code, lines = ci(tmp_path, 3)
    assert code == 1
    assert lines[:3] == [f"unstable: tests/test_{number}.py" for number in range(3)]
    assert "at most 2" in lines[3]


def test_a_failure_fails_ci_whatever_is_listed(tmp_path: Path) -> None:
    code, _ = ci(tmp_path, 0, make_fails=True)
    assert code != 0
