"""A coordinator without a launcher, on a real store: signals, the end of its run, and its next start.

The loop is the real one, on a trainer that only counts.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import __main__ as coordinator
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.fleet.run_end import RunEnd, read_end
from atoll.coordinator.summary import Outcome
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import AtollError, RunEndedError, StoreError, UserError
from atoll.runtime.ports import reserve_port
from atoll.runtime.store import EmbeddedServer, Store, run_embedded_server
from atoll.wire.types import ServiceEntry
from tests.fakes import FakeRun, ListSource, batch
from tests.tokens import TOKEN

TIMEOUT_S = 30  # half of the grace: what a signal does not wait for ends before
Body = Callable[[], Awaitable[Outcome]]
Log = asyncio.Queue[logging.LogRecord]


class Life:
    """A coordinator in this process, started by hand, whose run is that of `body` and by default the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str, folder: Path, name: str, port: int) -> None:
        self._monkeypatch, self._url, self._folder = monkeypatch, url, folder
        self._name, self._port = name, port
        self.address = f"127.0.0.1:{port}"
        self.body: Body = self.loop
        self.begun, self.hanging = asyncio.Event(), asyncio.Event()
        self.make(steps=9)

    def make(self, *, steps: int, **sections: dict[str, Any]) -> None:
        """Another config of the same run."""
        coordinator = {"lease_s": 1, "drain_grace_s": 60, "port": self._port}
        run = {"name": self._name, "dir": self._folder, "steps": steps}
        self.run = FakeRun(
            self._folder,
            {
                "run": run,
                "checkpoint": {"at_end": True},
                **sections,
                "coordinator": coordinator | sections.get("coordinator", {}),
            },
        )

    @property
    def control(self) -> RunControl:
        return self.run.control

    def start(self, *, resume: bool = True) -> asyncio.Task[None]:
        life = self

        class FakeAssembly:
            def __init__(self, *parts: Any) -> None:
                life.run.control = next(part for part in parts if isinstance(part, RunControl))

            async def run(self, resume: bool) -> Outcome:
                life.begun.set()
                return await life.body()

        self._monkeypatch.setattr(coordinator, "Assembly", FakeAssembly)
        return asyncio.create_task(coordinator.run(self.run.config, self._url, None, resume))

    async def loop(self) -> Outcome:
        saved = self.run.checkpoints.steps()
        return await self.run.loop(saved[-1] if saved else 0).run()

    async def reached(self, step: int) -> None:
        await self.begun.wait()
        progress = self.control.progress
        while progress.step != step:
            progress = await self.control.follow(progress.revision, TIMEOUT_S)

    async def hang(self) -> Any:
        self.hanging.set()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def store(self) -> AsyncIterator[Store]:
        store = Store(self._url, self._name)
        await store.follow_epoch()
        yield store
        await store.close()


@pytest.fixture
def life(
    monkeypatch: pytest.MonkeyPatch,
    store_server: EmbeddedServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Life:
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with reserve_port() as port:
        pass
    return Life(monkeypatch, store_server.url, tmp_path, f"life-{tmp_path.name}"[:60], port)


@pytest.fixture
async def log(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Log]:
    records: Log = asyncio.Queue()
    logger, handler = logging.getLogger("atoll"), QueueHandler(records)
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


async def logged(log: Log, text: str) -> None:
    while text not in (await log.get()).getMessage():
        pass


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_ends_the_wait_for_groups_and_saves_the_last_step(life: Life) -> None:
    life.run.source = ListSource([batch(1), batch(2)])
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await life.reached(2)
        interrupt()
        await running
    assert life.run.checkpoints.steps() == [2]
    assert (life.run.summary()["outcome"], life.run.summary()["steps"]) == ("interrupted", 2)
    async with life.store() as store:
        assert await read_end(store) is None  # its services wait for its next start


@pytest.mark.parametrize("what", ["push", "validate"])
async def test_a_signal_gives_up_what_other_services_do_not_finish(life: Life, what: str) -> None:
    validation = {"every": 1, "sets": [{"name": "sums", "path": "rows.jsonl"}]}
    life.make(steps=9, validation=validation)
    calls = [{}, {}]  # before the first step and after it

    async def call(*arguments: object) -> Any:
        return calls.pop() if calls else await life.hang()

    life.run.validations = [0.0] * 9
    setattr(life.run, what, call)
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await life.hanging.wait()
        interrupt()
        await running
    assert life.run.checkpoints.steps()[-1] == 2
    assert life.run.summary()["steps"] == 2


@pytest.mark.parametrize("every", [0, 1])
async def test_a_step_that_outlasts_the_grace_is_given_up_and_told_unless_the_one_before_is_saved(
    life: Life, every: int
) -> None:
    life.make(steps=9, checkpoint={"every": every, "at_end": True}, coordinator={"drain_grace_s": 0.1})
    actor, update = life.run.trainers["actor"], life.run.trainers["actor"].forward_backward

    async def hangs_in_the_second(key: Any, batch: Any) -> Any:
        return await (update(key, batch) if key.step == 1 else life.hang())

    actor.forward_backward = hangs_in_the_second  # type: ignore[method-assign]
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await life.hanging.wait()
        interrupt()
        if every:
            await running
        else:
            why = r"after step 1, but its last checkpoint is that of step 0: its last step did not end"
            with pytest.raises(coordinator.StoppedUnsavedError, match=why):
                await running


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RECOVERING])
async def test_a_signal_does_not_wait_for_services_that_are_not_there(life: Life, state: RunState) -> None:
    async def waits() -> Outcome:
        await life.control.report(state=state)
        return await life.hang()

    life.body = waits
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await life.hanging.wait()
        interrupt()
        await running


@pytest.mark.parametrize("is_warming_up", [False, True])
async def test_a_trainer_lost_with_unsaved_steps_is_told_at_a_stop(life: Life, is_warming_up: bool) -> None:
    if not is_warming_up:  # whose steps are no rows
        (life.run.config.folder / "metrics.jsonl").write_text('{"step": 5}\n')

    async def waits() -> Outcome:
        await life.control.report(state=RunState.TRAINING, step=5)
        await life.control.report(state=RunState.RECOVERING, error="actor-0 was lost")
        return await life.hang()

    life.body = waits
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await life.hanging.wait()
        interrupt()
        if is_warming_up:
            await running
            return
        with pytest.raises(
            coordinator.StoppedUnsavedError, match=r"after step 5.* of step 0: actor-0 was lost; "
        ):
            await running


async def test_a_signal_ends_the_wait_for_the_store(life: Life, log: Log) -> None:
    life._url = f"redis://127.0.0.1:{life._port}/0"  # where nobody listens
    running = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await logged(log, "waiting up to 14400 s for the store: store redis://127.0.0.1:")
        interrupt()
        await running
    assert not life.begun.is_set()


async def test_a_store_that_stays_away_ends_the_start_with_what_it_waited_for(life: Life) -> None:
    life.make(steps=9, coordinator={"start_timeout_s": 0.1})
    life._url = f"redis://127.0.0.1:{life._port}/0"
    why = r"not ready within 0\.1 s \(coordinator\.start_timeout_s\): store redis://127\.0\.0\.1:\d+/0: "
    with pytest.raises(StoreError, match=why):
        await life.start()


async def test_a_store_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    with reserve_port() as port:
        store = Store(f"redis://:secret@127.0.0.1:{port}/0", "toy")
        waiting = asyncio.create_task(store.wait_until_ready(TIMEOUT_S))
        with pytest.raises(StoreError):
            await store.ping()  # the other one has tried before
        with run_embedded_server(tmp_path, ("127.0.0.1", port), "secret"):
            await waiting
            await store.close()


async def test_a_folder_with_a_run_is_refused_without_resume(life: Life) -> None:
    (life.run.config.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"already contains a run: resume it \(--resume\)"):
        await life.start(resume=False)
    assert not life.begun.is_set()


async def told_that_it_has_ended(life: Life, role: str, name: str) -> None:
    """Registers, as a service that starts does."""
    client = CoordinatorClient(life.address, Caller(token=TOKEN))
    with pytest.raises(RunEndedError):
        await client.register(ServiceEntry(role, name, "ab12", "127.0.0.1:1"))
    await client.close()


async def test_a_run_that_has_ended_is_not_trained_again_and_its_services_are_told(
    life: Life, log: Log
) -> None:
    life.make(steps=2)
    await life.start()
    async with life.store() as store:
        assert await read_end(store) == RunEnd(2, 2, None)
    life.make(steps=2)
    life.begun.clear()
    again = life.start()
    async with asyncio.timeout(TIMEOUT_S):
        await logged(log, "ended at step 2 of 2; to train further, raise run.steps and start it again")
        for role, name in (("actor", "actor-0"), ("reward", "reward-3f2a"), ("rollout", "rollout-3f2b")):
            assert not again.done()
            await told_that_it_has_ended(life, role, name)
        await again
    assert not life.begun.is_set()
    assert len(life.run.rows()) == 2


async def test_a_run_with_another_goal_continues_where_it_has_ended(life: Life) -> None:
    life.make(steps=2)
    await life.start()
    life.make(steps=3)
    life.run.source = ListSource([batch(3)], first=3)
    await life.start()
    assert life.run.checkpoints.steps()[-1] == 3
    async with life.store() as store:
        assert await read_end(store) == RunEnd(3, 3, None)


async def test_a_run_that_failed_has_not_ended(life: Life) -> None:
    async def fails() -> Outcome:
        raise AtollError("no reward service")

    life.body = fails
    with pytest.raises(AtollError, match="no reward service"):
        await life.start()
    async with life.store() as store:
        assert await read_end(store) is None


PROGRAM = """
import asyncio, sys
from atoll.coordinator import __main__ as coordinator
from atoll.coordinator.control import RunState
class FakeAssembly:
    def __init__(self, config, store, registry, servers, control, caller): self.control = control
    async def run(self, resume):
        await self.control.report(state=RunState.TRAINING)
        print("trains", file=sys.stderr, flush=True)
        await asyncio.Event().wait()
coordinator.Assembly = FakeAssembly
coordinator.main()
"""


def test_a_second_signal_ends_the_process_at_once(life: Life, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(life.run.config.model_dump_json())
    words = [sys.executable, "-c", PROGRAM, "--config", str(config), "--store", life._url, "--resume"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for expected in ("trains", "finishing the step in progress within 60 s"):
            assert any(expected in line for line in iter(process.stderr.readline, ""))
            process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM
