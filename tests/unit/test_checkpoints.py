"""A checkpoint becomes valid when all of it is written, and training goes on meanwhile."""

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest

from atoll.config.schema import Role
from atoll.coordinator.algorithm.algorithm import AlgorithmState
from atoll.coordinator.journal import checkpoints
from atoll.coordinator.journal.checkpoints import BestValidation, Checkpoints, CoordinatorState
from atoll.runtime.errors import (
    AtollError,
    CheckpointError,
    DamagedCheckpointError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.types import CheckpointWrite, Version


class Model:
    """Writes when it is told to; `error` is what becomes of it instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_write, self.has_written = asyncio.Event(), asyncio.Event()
        self.began: list[Path] = []
        self._error = error

    async def save_checkpoint(self, path: Path) -> None:
        self.began.append(path)

    async def wait_checkpoint(self, path: Path) -> CheckpointWrite:
        await self.may_write.wait()
        if self._error:
            raise self._error
        await asyncio.to_thread(path.mkdir)
        self.has_written.set()
        return CheckpointWrite(num_bytes=100, seconds=2.0)


class Journal:
    """What a snapshot of the journal does: it writes a file."""

    async def write(self, path: Path) -> None:
        await asyncio.to_thread(path.write_bytes, b"journal")


def loaded(checkpoints: Checkpoints, step: int) -> tuple[CoordinatorState, bytes]:
    state, journal, _ = checkpoints.load(step)
    return state, journal.read_bytes()


def state(step: int, best: BestValidation | None = None) -> CoordinatorState:
    return CoordinatorState(
        step, Version("a3f0", step), None, best, AlgorithmState(kl_coef=0.1, log_multiplier=0.0)
    )


class Run:
    """Checkpoints of a run, and what it was told of them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder, keep)
        self.committed: list[str] = []

    async def begin(self, step: int, models: dict[Role, Model], best: BestValidation | None = None) -> None:
        async def committed(path: Path) -> None:
            assert path.name in self.names
            self.committed.append(path.name)

        await self.checkpoints.begin(state(step, best), Journal(), models, committed)

    async def save(self, step: int, best: BestValidation | None = None) -> None:
        model = Model()
        model.may_write.set()
        await self.begin(step, {"actor": model}, best)
        await self.checkpoints.finish()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


async def test_it_is_valid_when_the_last_model_has_written(tmp_path: Path) -> None:
    run, actor, critic = Run(tmp_path), Model(), Model()
    await run.begin(4, {"actor": actor, "critic": critic})
    assert await run.checkpoints.take_metrics() == {}
    actor.may_write.set()
    await actor.has_written.wait()
    assert run.checkpoints.steps() == []
    assert run.committed == []
    critic.may_write.set()
    await run.checkpoints.finish()
    assert run.names == run.committed == ["step-000004"]
    assert loaded(run.checkpoints, 4) == (state(4), b"journal")
    # both wrote at the same time, 2 s each; 100 bytes each
    assert await run.checkpoints.take_metrics() == {"checkpoint/write_s": 2.0, "checkpoint/num_bytes": 200.0}
    assert await run.checkpoints.take_metrics() == {}


async def test_a_second_one_waits_for_the_first(tmp_path: Path) -> None:
    run, first, second = Run(tmp_path), Model(), Model()
    await run.begin(1, {"actor": first})
    waiting = asyncio.create_task(run.begin(2, {"actor": second}))
    await asyncio.sleep(0)
    assert second.began == []
    first.may_write.set()
    await waiting
    assert run.committed == ["step-000001"]
    assert second.began == [tmp_path / ".partial-000002" / "actor"]
    await run.checkpoints.abandon()


async def test_a_full_disk_leaves_those_before(tmp_path: Path) -> None:
    run, model = Run(tmp_path), Model(CheckpointError("No space left on device"))
    await run.save(1)
    await run.begin(2, {"actor": model})
    model.may_write.set()
    with pytest.raises(
        AtollError, match=r"step 2 in .*: No space left on device; the last valid one is step 1"
    ):
        await run.checkpoints.finish()
    assert run.names == run.committed == ["step-000001"]


async def test_a_lost_trainer_is_no_full_disk(tmp_path: Path) -> None:
    run, model = Run(tmp_path), Model(ServiceUnavailableError("gone"))
    await run.begin(2, {"actor": model})
    model.may_write.set()
    with pytest.raises(ServiceUnavailableError, match="gone"):
        await run.checkpoints.finish()
    assert run.checkpoints.steps() == []


async def test_what_a_failed_run_was_writing_never_becomes_valid(tmp_path: Path) -> None:
    run, model = Run(tmp_path), Model()
    await run.begin(2, {"actor": model})
    await run.checkpoints.abandon()
    model.may_write.set()
    await asyncio.sleep(0)
    await run.checkpoints.finish()
    assert run.names == [".partial-000002"]
    await run.save(2)  # by the run that goes on
    assert run.names == ["step-000002"]


async def test_one_that_is_just_becoming_valid_is_valid_before_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it removes old ones while the run that goes on reads them."""
    run, model, in_thread, may_go_on = Run(tmp_path, keep=1), Model(), threading.Event(), threading.Event()
    await run.save(1)
    write = checkpoints._write

    def slow(path: Path, content: bytes) -> None:
        in_thread.set()
        assert may_go_on.wait(30)
        write(path, content)

    monkeypatch.setattr(checkpoints, "_write", slow)
    await run.begin(2, {"actor": model})
    model.may_write.set()
    assert await asyncio.to_thread(in_thread.wait, 30)
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    await run.checkpoints.abandon()
    assert run.names == ["step-000002"]
    assert run.checkpoints.steps() == [2]
    assert loaded(run.checkpoints, 2) == (state(2), b"journal")


async def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    run, best = Run(tmp_path, keep=2), BestValidation(step=1, value=0.9)
    for step in (1, 2, 3, 4):
        await run.save(step, best)
    assert run.names == ["step-000001", "step-000003", "step-000004"]
    await run.save(5, BestValidation(step=5, value=1.0))
    assert run.names == ["step-000004", "step-000005"]


async def test_one_that_is_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies while it removes the one before, then one of a lineage that was left behind."""
    rmtree, run = shutil.rmtree, Run(tmp_path, keep=1)

    def dies(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (path / "journal.bin").unlink()
            raise RuntimeError("died")
        rmtree(path, ignore_errors)

    await run.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", dies)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="died"):
                await run.save(2)
            assert run.checkpoints.steps() == [2]
            assert loaded(run.checkpoints, 2) == (state(2), b"journal")
    await run.save(3)
    assert run.names == ["step-000003"]


async def test_files_of_other_names_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    for name in ("step-5.bak", "step-000005.bak", "step-"):
        (tmp_path / name).mkdir()
    await run.save(1)
    await run.save(2)
    assert run.checkpoints.steps() == [2]
    assert run.names == ["step-", "step-000002", "step-000005.bak", "step-5.bak"]


async def test_one_that_replaces_another_is_on_disk_before_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, synced = Run(tmp_path, keep=1), list[tuple[str, list[str]]]()
    await run.save(1)
    monkeypatch.setattr(checkpoints, "_fsync", lambda path: synced.append((path.name, run.names)))
    await run.save(2)
    assert [name for name, _ in synced] == ["journal.bin", ".partial-000002", tmp_path.name]
    assert synced[-1][1] == ["step-000001", "step-000002"]
    assert run.names == ["step-000002"]


async def test_a_checkpoint_of_the_version_before_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """It had the data cursor in coordinator.json, and no format."""
    run = Run(tmp_path)
    await run.save(4)
    path = tmp_path / "step-000004" / "coordinator.json"
    tree = json.loads(path.read_text())
    del tree["format"]
    path.write_text(json.dumps(tree | {"cursor": {"seed": 0, "shuffle": True, "rows": [9], "drawn": [3]}}))
    with pytest.raises(
        UserError, match=r"step-000004 was written by another version of Atoll .* start a new one"
    ):
        run.checkpoints.load(4)


async def test_a_damaged_one_names_an_older_one(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    for step in (1, 2, 3):
        await run.save(step)
    (tmp_path / "step-000003" / "coordinator.json").write_text('{"format": 2, "st')
    (tmp_path / "step-000002" / "journal.bin").unlink()
    (tmp_path / "step-000001" / "coordinator.json").unlink()
    for step, what, advice in (
        (3, "coordinator.json: ", "resume from an older one: --resume --step 2"),
        (2, "it has no journal.bin", "resume from an older one: --resume --step 1"),
        (1, "coordinator.json: .*No such file", "there is no older one"),
    ):
        path = run.checkpoints.path(step)
        with (
            pytest.raises(DamagedCheckpointError, match=f"{path} is damaged: {what}.*; {advice}$"),
            run.checkpoints.explain_damage(step),
        ):
            run.checkpoints.load(step)


async def test_later_ones_are_left_behind(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    for step in (1, 2, 3):
        await run.save(step)
    with pytest.raises(UserError, match="has no checkpoint of step 4, only of: 1, 2, 3"):
        run.checkpoints.leave_after(4)
    assert [path.name for path in run.checkpoints.leave_after(1)] == ["left-000002-1", "left-000003-1"]
    assert run.checkpoints.steps() == [1]
    await run.save(2)
    assert [path.name for path in run.checkpoints.leave_after(1)] == ["left-000002-2"]
