"""Dumps of a run that was continued: those of steps that are repeated are kept beside the others."""

from pathlib import Path

from atoll.coordinator.journal.dump import read_dump, set_dumps_aside, write_dump
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
