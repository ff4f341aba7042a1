"""Each finding's threshold and advice."""

import importlib.metadata
import os

import pytest

from services.cli import doctor
from services.cli.doctor import GIB, State


def test_one_core_is_a_warning() -> None:
    assert doctor.cores(1).state is State.WARNING
    assert doctor.cores(2).state is State.OK


def test_little_memory_is_a_warning() -> None:
    assert doctor.memory(4 * GIB - 1).state is State.WARNING
    assert doctor.memory(4 * GIB).state is State.OK


def test_shared_memory_must_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory().state is State.OK

    def refuse(name: str) -> int:
        raise PermissionError("seccomp says no")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = doctor.shared_memory()
    assert (finding.found, finding.state) == ("seccomp says no", State.MISSING)


@pytest.mark.parametrize(
    ("version", "state", "found"),
    [("2.13.0+cpu", State.OK, "2.13.0+cpu"), ("2.9.1", State.MISSING, "2.9.1, but ==2.13.0 is needed")],
)
def test_a_package_must_fit(monkeypatch: pytest.MonkeyPatch, version: str, state: State, found: str) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch==2.13.0; extra == 'cpu'"])
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    (finding,) = doctor.packages()
    assert (finding.what, finding.found, finding.state) == ("torch", found, state)


def test_a_package_that_is_not_installed_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["no-such-package>=1"])
    (finding,) = doctor.packages()
    assert finding.state is State.MISSING
    assert finding.advice == "pip install --editable '.[cpu]'"
