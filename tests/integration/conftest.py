"""A real store server, once per session; each test has its own run's keys in it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from services.runtime.store import EmbeddedServer, Store, embedded


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with embedded(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
async def store(store_server: EmbeddedServer, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    store = Store(store_server.url, request.node.name)
    await store.take_epoch()
    yield store
    await store.close()
