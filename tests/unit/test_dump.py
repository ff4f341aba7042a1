"""Which samples a run keeps: over many steps, when it is continued, and on a full disk."""

import os
from pathlib import Path
from typing import Literal

import pytest

from atoll.runtime.dump import DumpFolder, answered_sets, read_dump, set_dumps_aside, write_dump
from atoll.runtime.errors import AtollError
from atoll.wire.codec.journal import decode_dump, encode_dump
from atoll.wire.types import Group
from tests.builders import V0, group, node, sample, sample_id


def test_batches_of_abandoned_steps_are_kept_under_another_name(tmp_path: Path) -> None:
    def dump(step: int, prompt: int) -> None:
        write_dump(tmp_path, step, V0, [group(sample(sample_id(prompt), node([3])))])

    for step in (1, 2, 3):
        dump(step, prompt=step)
    set_dumps_aside(tmp_path, after=1)
    assert [path.name for path in sorted(tmp_path.glob("step-*.pb"))] == ["step-000001.pb"]
    dump(2, prompt=7)
    set_dumps_aside(tmp_path, after=1)
    prompts = {
        path.name: read_dump(path)[1][0].prompt.id.prompt for path in sorted(tmp_path.glob("left-*.pb"))
    }
    assert prompts == {"left-000002-1.pb": 2, "left-000002-2.pb": 7, "left-000003-1.pb": 3}
    set_dumps_aside(tmp_path / "none", after=0)


def batch(prompt: int = 0) -> list[Group]:
    return [group(sample(sample_id(prompt), node([3])))]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


async def test_the_last_ten_batches_and_all_answers_are_kept(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path, "recent")
    await dumps.write_answers("a/b", 0, V0, batch())
    for step in range(1, 5):
        await dumps.write_batch(step, V0, batch())
    set_dumps_aside(tmp_path, after=2)
    assert names(tmp_path)[:2] == ["left-000003-1.pb", "left-000004-1.pb"]
    for step in range(3, 14):
        await dumps.write_batch(step, V0, batch())
    assert names(tmp_path) == [
        "left-000004-1.pb",  # a step that was repeated is as old as its repetition
        *(f"step-{step:06d}.pb" for step in range(4, 14)),
        "val-a%2Fb/step-000000.pb",
    ]
    assert answered_sets(tmp_path) == ["a/b"]


async def test_answers_of_abandoned_steps_are_set_aside(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path, "all")
    for step in (2, 4):
        await dumps.write_answers("sums", step, V0, batch())
    set_dumps_aside(tmp_path, after=2)
    assert names(tmp_path / "val-sums") == ["left-000004-1.pb", "step-000002.pb"]


async def test_nothing_is_kept_with_none(tmp_path: Path) -> None:
    dumps = DumpFolder(tmp_path, "none")
    await dumps.write_batch(1, V0, batch())
    await dumps.write_answers("sums", 1, V0, batch())
    assert names(tmp_path) == []


def fill_disk(folder: Path, step: int) -> None:
    """For the dump of `step` alone."""
    (folder / f"step-{step:06d}.partial").symlink_to("/dev/full")


async def test_a_full_disk_costs_the_samples_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill_disk(tmp_path, 1)
    dumps = DumpFolder(tmp_path, "recent")
    await dumps.write_batch(1, V0, batch())
    assert "step 1: its samples cannot be written" in caplog.text
    assert "No space left on device" in caplog.text
    assert os.listdir(tmp_path) == []
    await dumps.write_batch(2, V0, batch())
    assert names(tmp_path) == ["step-000002.pb"]


@pytest.mark.parametrize(("keep", "required"), [("all", False), ("recent", True)])
async def test_a_full_disk_ends_a_run_that_needs_its_samples(
    tmp_path: Path, keep: Literal["all", "recent"], required: bool
) -> None:
    fill_disk(tmp_path, 1)
    reason = "No space left on device; fix the cause, then continue with --resume"
    with pytest.raises(AtollError, match=reason):
        await DumpFolder(tmp_path, keep, required=required).write_batch(1, V0, batch())
    assert os.listdir(tmp_path) == []


def test_a_dump_is_encoded_group_by_group() -> None:
    """So that no call keeps the event loop's thread from running for longer than a group takes."""
    groups = [*batch(0), *batch(1), *batch(2)]
    pieces = list(encode_dump(7, V0, groups))
    assert len(pieces) == 3 + 2
    step, version, decoded = decode_dump(b"".join(pieces))
    assert (step, version) == (7, V0)
    assert [each.prompt.id.prompt for each in decoded] == [0, 1, 2]
