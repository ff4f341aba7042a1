"""A real store server and the arithmetic task's files, once per session; each test has its own run's keys."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.runtime.store import EmbeddedServer, Store, run_embedded_server
from tests.survival.moments import environment


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with run_embedded_server(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
async def store(store_server: EmbeddedServer, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = Store(store_server.url, request.node.name)
    await store.take_epoch()
    yield store
    await store.close()


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data of sums of one digit. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("arithmetic")
    build_arithmetic(folder, seed=0, digits=1)
    return folder


@pytest.fixture
def survival(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose services report moments. It moves to `tmp_path` afterwards; before, paths of
    sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SCRIPTED_LOG", str(folder / "engine.jsonl"))
    yield folder
    shutil.move(folder, tmp_path)
