"""What the audit says of ledgers written by hand, event by event, and of dumps beside them."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.cli.audit import AuditReport, SampleFate, audit
from atoll.cli.main import main
from atoll.coordinator.journal.ledger import LEDGER, Ledger
from atoll.runtime.dump import write_dump
from atoll.runtime.errors import AtollError
from atoll.wire.types import SampleId, Version
from tests.builders import V0, group, node, sample, sample_id


def ids(*prompts: int) -> list[SampleId]:
    """Groups of two."""
    return [sample_id(prompt, index) for prompt in prompts for index in range(2)]


def cursor(drawn: int) -> str:
    return json.dumps({"drawn": [drawn]})


class Run:
    """Writes the ledger of a run whose lineages are named a, b, c, ..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / LEDGER)
        self.ledger.branch("a", None, 0, continues=None, cursor=None, pending=[])

    def issue(self, *prompts: int, drawn: int) -> None:
        self.ledger.issue(ids(*prompts), cursor(drawn))

    def train(self, step: int, *prompts: int) -> None:
        self.ledger.consume(step, ids(*prompts))

    def restart(
        self, lineage: str, parent: str, step: int, drawn: int, pending: Sequence[int], continues: str | None
    ) -> None:
        spans = [f"0/{prompt}/0-1" for prompt in pending]
        parent_version = Version(parent, step)
        self.ledger.branch(
            lineage, parent_version, step, continues=continues, cursor=cursor(drawn), pending=spans
        )

    def audit(self) -> AuditReport:
        return audit(self.folder)


@pytest.fixture
def toy(tmp_path: Path) -> Run:
    return Run(tmp_path)


def fates(report: AuditReport) -> dict[int, str]:
    """Of prompts, whose samples share one."""
    of_prompt: dict[int, set[str]] = {}
    for name, fate in report.fates.items():
        text = {"trained": f"trained {fate.step}", "dropped": f"dropped {fate.reason}"}.get(
            fate.kind, fate.kind
        )
        of_prompt.setdefault(int(name.split("/")[1]), set()).add(text)
    assert all(len(found) == 1 for found in of_prompt.values())
    return {prompt: found.pop() for prompt, found in of_prompt.items()}


def test_every_sample_is_trained_dropped_or_pending(toy: Run) -> None:
    toy.issue(0, 1, 2, drawn=3)
    toy.ledger.drop(ids(1), "filtered", None)
    toy.train(1, 0)
    toy.ledger.commit(1)
    report = toy.audit()
    assert fates(report) == {0: "trained 1", 1: "dropped filtered", 2: "pending"}
    assert report.fates["0/0/1"] == SampleFate("trained", 1)
    assert (report.lineage, report.exit_code) == ("a", 0)


def test_a_batch_that_was_refused_is_dropped_with_its_step(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(1, 0)
    toy.ledger.drop(ids(0), "refused by the trainer: NaN", 1)
    toy.train(2, 1)
    toy.ledger.drop(ids(1), "late", None)  # the journal keeps what was consumed
    write_dump(toy.folder / "dumps", 1, V0, [group(*(sample(id, node([3])) for id in ids(0)))])
    report = toy.audit()
    assert fates(report) == {0: "dropped refused by the trainer: NaN", 1: "trained 2"}
    assert report.exit_code == 0


def test_what_was_refused_in_a_step_that_is_repeated_is_no_part_of_its_batch(toy: Run) -> None:
    toy.issue(0, 1, 2, drawn=3)
    toy.train(1, 0)
    toy.train(2, 1)
    toy.ledger.drop(ids(1), "refused by the trainer: NaN", 2)
    toy.restart("b", "a", 1, 3, [2], continues="a")
    toy.train(2, 2)
    write_dump(toy.folder / "dumps", 2, V0, [group(*(sample(id, node([3])) for id in ids(2)))])
    report = toy.audit()
    assert fates(report) == {0: "trained 1", 1: "dropped refused by the trainer: NaN", 2: "trained 2"}
    assert report.exit_code == 0


def test_what_followed_the_restored_step_is_void(toy: Run) -> None:
    """Steps 2 and 3 are repeated, in another order, by tables that went on and by rebuilt ones."""
    toy.issue(0, 1, 2, drawn=3)
    toy.train(1, 0)
    toy.train(2, 1)
    toy.issue(3, drawn=4)
    toy.train(3, 2)
    toy.restart("b", "a", 1, 4, [1, 2, 3], continues="a")
    toy.train(2, 2)
    toy.train(3, 1)
    assert fates(toy.audit()) == {0: "trained 1", 1: "trained 3", 2: "trained 2", 3: "pending"}
    toy.restart("c", "a", 1, 3, [1, 2], continues=None)  # the checkpoint was taken before prompt 3
    report = toy.audit()
    assert fates(report) == {0: "trained 1", 1: "pending", 2: "pending"}
    toy.issue(3, drawn=4)  # drawn again
    assert toy.audit().exit_code == report.exit_code == 0


def test_a_drop_that_the_store_did_not_hear_of_is_pending_again(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.ledger.drop(ids(0), "filtered", None)
    toy.restart("b", "a", 0, 2, [0, 1], continues="a")
    report = toy.audit()
    assert (fates(report), report.exit_code) == ({0: "pending", 1: "pending"}, 0)


def test_a_dropped_sample_stays_dropped_over_restarts(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.ledger.drop(ids(0), "filtered", None)
    toy.restart("b", "a", 0, 2, [1], continues="a")
    toy.restart("c", "b", 0, 2, [1], continues=None)
    report = toy.audit()
    assert (fates(report), report.exit_code) == ({0: "dropped filtered", 1: "pending"}, 0)


def test_an_issue_that_was_not_recorded_before_a_crash_is_known_from_the_restart(toy: Run) -> None:
    toy.issue(0, drawn=1)
    toy.restart("b", "a", 0, 2, [0, 1], continues="a")
    assert (fates(toy.audit()), toy.audit().exit_code) == ({0: "pending", 1: "pending"}, 0)


def test_a_sample_in_two_steps_of_one_path_is_wrong(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(1, 0)
    toy.restart("b", "a", 1, 2, [1], continues="a")
    toy.train(2, 0, 1)
    report = toy.audit()
    assert report.wrong == (
        "trained on twice, in steps 1 and 2: 0/0/0",
        "trained on twice, in steps 1 and 2: 0/0/1",
    )
    assert report.exit_code == 1


def test_a_step_trained_on_twice_in_a_lineage_that_was_left_is_wrong_too(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(1, 0)
    toy.train(2, 0)
    toy.restart("b", "a", 0, 2, [0, 1], continues="a")
    assert toy.audit().exit_code == 1


def test_an_old_cursor_after_a_restart_is_wrong(toy: Run) -> None:
    toy.issue(0, 1, 2, drawn=3)
    toy.train(1, 0)
    toy.restart("b", "a", 1, 2, [1, 2], continues="a")
    assert toy.audit().wrong == (
        "after the restart from step 1, the data cursor is 1 prompts behind the issued prompts",
    )


def test_a_prompt_that_was_drawn_and_not_issued_is_lost(toy: Run) -> None:
    toy.issue(0, drawn=1)
    toy.issue(2, drawn=3)
    toy.issue(3, drawn=4)
    report = toy.audit()
    assert report.wrong == ("after an issue, 1 prompts were drawn and never issued",)  # said once
    assert report.exit_code == 1


def test_a_sample_that_no_restart_finds_again_is_lost(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.restart("b", "a", 0, 2, [0], continues="a")
    assert "lost: issued, but gone after the restart from step 0: 0/1/0 0/1/1" in toy.audit().wrong


def test_what_a_restart_issues_again_though_it_was_trained_on_is_wrong(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(1, 0)
    toy.restart("b", "a", 1, 2, [0, 1], continues="a")
    assert toy.audit().wrong == (
        "pending after the restart from step 1, which had trained on them: 0/0/0 0/0/1",
    )
    toy.issue(1, drawn=2)
    assert "issued twice: 0/1/0 0/1/1" in toy.audit().wrong


def test_a_step_without_a_record_cannot_be_told(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(2, 1)
    toy.ledger.commit(2)
    report = toy.audit()
    assert report.unknown == ("no record says what these steps trained on: 1",)
    assert report.exit_code == 3


def test_a_dump_tells_of_a_step_that_was_not_recorded_and_of_a_second_use(toy: Run) -> None:
    toy.issue(0, 1, drawn=2)
    toy.train(1, 0)
    batch = [group(*(sample(id, node([3])) for id in ids(prompt))) for prompt in (0, 1)]
    write_dump(toy.folder / "dumps", 1, V0, batch[:1])
    write_dump(toy.folder / "dumps", 2, V0, batch[1:])
    report = toy.audit()
    assert report.unknown == ("in the dump of step 2, but no record says that it consumed them: 0/1/0 0/1/1",)
    assert report.exit_code == 3
    write_dump(toy.folder / "dumps", 2, V0, batch[:1])
    report = toy.audit()
    assert report.wrong[0] == "trained on twice: in step 1, and in the dump of step 2: 0/0/0"
    write_dump(toy.folder / "dumps", 1, V0, batch[1:])
    assert "consumed by step 1 as recorded, but not in its dump: 0/0/0 0/0/1" in toy.audit().unknown


def test_a_line_that_a_crash_cut_off_is_left_out(toy: Run) -> None:
    toy.issue(0, drawn=1)
    path = toy.folder / LEDGER
    with path.open("a") as file:
        file.write('{"event": "consume", "lin')
    assert (fates(toy.audit()), toy.audit().exit_code) == ({0: "pending"}, 0)
    toy.restart("b", "a", 0, 1, [0], continues="a")  # begins a line of its own
    toy.train(1, 0)
    assert (fates(toy.audit()), toy.audit().exit_code) == ({0: "trained 1"}, 0)


def test_a_damaged_line_within_a_life_cannot_be_told(toy: Run) -> None:
    toy.issue(0, drawn=1)
    with (toy.folder / LEDGER).open("a") as file:
        file.write("\0\0\0\n")
    toy.train(1, 0)
    report = toy.audit()
    assert report.exit_code == 3
    assert f"line 3 of {toy.folder / LEDGER} cannot be read" in report.unknown[0]


def test_a_coordinator_that_was_replaced_changes_nothing(toy: Run) -> None:
    """It records its drop, and only then learns from the store that another one took over."""
    toy.issue(0, drawn=1)
    old = Ledger(toy.folder / LEDGER)
    old._lineage = "a"
    toy.restart("b", "a", 0, 1, [0], continues="a")
    old.drop(ids(0), "filtered", None)
    assert (fates(toy.audit()), toy.audit().exit_code) == ({0: "pending"}, 0)


def test_a_folder_without_a_ledger_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 3
    assert "ledger.jsonl is missing: an earlier version of Atoll wrote none" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "none")]) == 2


def test_the_command_lists_every_sample(toy: Run, capsys: pytest.CaptureFixture[str]) -> None:
    toy.issue(0, 1, 2, 3, drawn=4)
    toy.ledger.drop(ids(1), "filtered", None)
    toy.train(1, 0, 3)
    assert main(["audit", str(toy.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "dropped (filtered): 0/1/0-1",
        "pending: 0/2/0-1",
        "trained in step 1: 0/0/0-1 0/3/0-1",
        "8 samples: 4 trained, 2 dropped, 2 pending",
    ]
    assert main(["audit", str(toy.folder), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["samples"]["0/1/1"] == {"fate": "dropped", "step": None, "reason": "filtered"}
    assert (tree["lineage"], tree["wrong"], tree["unknown"], len(tree["samples"])) == ("a", [], [], 8)


def test_a_ledger_that_cannot_be_written_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    full = Ledger(Path("/dev/full"))
    with pytest.raises(AtollError, match=r"/dev/full cannot be written: .*No space left.*--resume"):
        full.commit(1)
