"""The comparison of two runs says what differs, by name, and nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.runtime.dump import write_dump
from atoll.wire.types import WHOLE, TurnReward, Version
from tests.builders import V0, group, node, sample, sample_id
from tests.compare_runs import compare, main
from tests.dumped import NO_VERSION, read_current, read_samples, read_v0

OLD_DUMP = Path(__file__).parents[1] / "data" / "dump_v0.pb"
ABOVE_HALF = float(np.nextafter(np.float32(0.5), np.float32(1)))  # one bit more
LOGPROB = "sample 0/7/0, token 3: -0.5, -0.50000006"
COMPONENT = "sample 0/7/0: whole exact_match: 0.5, 0.0"
ADVANTAGE = "sample 0/7/0, token 0: 0.5, 0.50000006"


def write_run(
    folder: Path,
    *,
    prompt: int = 1,
    token: int = 4,
    logprob: float = -0.5,
    mask: bool = True,
    version: int = 0,
    reward: float = 1.0,
    component: float = 0.5,
    loss: float | None = 0.0,
    seconds: float = 2.0,
    advantage: float = 0.5,
    indices: tuple[int, ...] = (0, 1),
) -> Path:
    """A run of one step: two samples of one prompt, the first of which is as the arguments say."""
    tokens = node([3, token], [1, mask], logprobs=[-1.0, logprob], versions=Version("l", version))
    rewards = (TurnReward(WHOLE, reward, {"exact_match": component}),)
    samples = {0: sample(sample_id(7, 0), tokens, rewards=rewards), 1: sample(sample_id(7, 1), node([5]))}
    folder.mkdir()
    write_dump(folder / "dumps", 1, V0, [group(*(samples[i] for i in indices), ids=(8, prompt))])
    row = {"step": 1, "actor/pg_loss": loss, "timing_s/step": seconds, "rollout/tokens_per_s": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "recorded").mkdir()
    np.savez(
        folder / "recorded" / "step-000001.npz",
        ids=np.array(["0/7/0", "0/7/1"]),
        offsets=np.array([0, 2, 3]),
        advantages=np.array([advantage, 0.25, -1.0], np.float32),
    )
    return folder


def differences(before: Path, after: Path) -> list[str]:
    found, _ = compare(before, after)
    return found.lines()


def test_equal_runs_differ_in_nothing_but_times(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", seconds=3.0)
    found, notes = compare(before, after)
    assert (found.total, found.lines()) == (0, [])
    assert notes == [
        "metrics of 1 and 1 rows: actor/pg_loss",
        "left out, a rate: rollout/tokens_per_s",
        "left out, a time: timing_s/step",
        "dumps of 1 and 1 steps, 2 samples",
        "recorded of 1 and 1 steps: advantages",
    ]


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"token": 6}, "token_ids: 1 differ, by 2 at most", "sample 0/7/0, token 3: 4, 6"),
        ({"logprob": -ABOVE_HALF}, "logprobs: 1 differ, by 5.96e-08 at most", LOGPROB),
        ({"version": 2}, "versions: 1 differ, by 2 at most", "sample 0/7/0, token 2 and 1 more: 0, 2"),
        ({"reward": 0.75}, "rewards: 1 differ, by 0.25 at most", "sample 0/7/0: whole: 1.0, 0.75"),
        ({"component": 0.0}, "rewards: 1 differ, by 0.5 at most", COMPONENT),
        ({"loss": 0.25}, "actor/pg_loss: 1 differ, by 0.25 at most", "0.0, 0.25"),
        ({"loss": -0.0}, "actor/pg_loss: 1 differ", "0.0, -0.0"),
        ({"loss": None}, "actor/pg_loss: 1 differ, by inf at most", "0.0, None"),
        ({"advantage": ABOVE_HALF}, "recorded advantages: 1 differ, by 5.96e-08 at most", ADVANTAGE),
        ({"indices": (0,)}, "samples: 1 differ", "sample 0/7/1 only in BEFORE"),
        ({"indices": (1, 0)}, "order: 1 differ", "the same samples in another order, or one of them twice"),
    ],
)
def test_each_difference_is_reported_by_name(
    tmp_path: Path, change: dict[str, Any], kind: str, what: str
) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", **change)
    assert differences(before, after) == [kind, f"  step 1: {what}"]


def test_another_prompt_is_a_difference_of_all_its_samples(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", prompt=2)
    assert differences(before, after) == [
        "token_ids: 2 differ, by 1 at most",
        "  step 1: sample 0/7/0, token 1: 1, 2",
        "  step 1: sample 0/7/1, token 1: 1, 2",
    ]


def test_a_masked_token_has_no_version_either(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", mask=False)
    assert differences(before, after) == [
        "mask: 1 differ, by 1 at most",
        "  step 1: sample 0/7/0, token 3: True, False",
        "versions: 1 differ, by 1 at most",
        f"  step 1: sample 0/7/0, token 3: 0, {NO_VERSION}",
    ]


def test_what_one_run_alone_has_is_a_difference(tmp_path: Path) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after")
    with (after / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "actor/pg_loss": 0.0}\n')
    write_dump(after / "dumps", 2, V0, [group(sample(sample_id(8), node([3])))])
    assert differences(before, after) == [
        "metrics: 1 differ",
        "  step 2 only in AFTER",
        "dumps: 1 differ",
        "  step 2 only in AFTER",
    ]


def test_ten_of_a_kind_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    for name, first in (("before", 10), ("after", 20)):
        samples = [sample(sample_id(7, i), node([first + i])) for i in range(12)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        write_dump(tmp_path / name / "dumps", 1, V0, [group(*samples)])
    lines = differences(tmp_path / "before", tmp_path / "after")
    assert lines[0] == "token_ids: 12 differ, by 10 at most"
    assert lines[1:] == [f"  step 1: sample 0/7/{i}, token 1: {10 + i}, {20 + i}" for i in range(10)]


def test_a_run_without_dumps_is_not_equal_to_anything(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert differences(tmp_path, tmp_path) == ["dumps: 1 differ", f"  there is none in {tmp_path / 'dumps'}"]


def test_the_exit_code_says_whether_anything_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write_run(tmp_path / "before"), write_run(tmp_path / "after", token=6)
    for other, code, last in ((before, 0, "0 differences"), (after, 1, "1 differences")):
        monkeypatch.setattr("sys.argv", ["compare_runs", str(before), str(other)])
        assert main() == code
        assert capsys.readouterr().out.splitlines()[-1] == last


def test_an_old_dump_is_read_by_its_own_schema() -> None:
    """Written by the old code: a sample of two versions, a tree with a tool's answer, a greedy baseline, an
    empty response."""
    assert [s.id for s in read_samples(OLD_DUMP)] == [s.id for s in read_v0(OLD_DUMP)]
    two_versions, tree, greedy, empty = read_v0(OLD_DUMP)
    assert [s.id for s in (two_versions, tree, greedy, empty)] == ["0/7/0", "0/7/1", "0/7/2", "0/5/0"]
    none = NO_VERSION
    assert two_versions.token_ids.tolist() == [4, 13, 5, 8, 10, 2]
    assert two_versions.mask.tolist() == [False, False, False, True, True, True]
    assert two_versions.logprobs.tobytes() == np.array([0, 0, 0, -0.1, -0.7, -0.0], np.float32).tobytes()
    assert two_versions.versions.tolist() == [none, none, none, 3, 3, 4]
    assert two_versions.rewards == {"whole": 1.0, "whole exact_match": 1.0}
    assert tree.token_ids.tolist() == [4, 13, 5, 8, 9, 30, 31, 11, 2]
    assert tree.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert tree.logprobs.tolist() == [0, 0, 0, -0.25, -0.5, 0, 0, -1.5, -2]
    assert tree.versions.tolist() == [none] * 3 + [4] * 2 + [none] * 2 + [4] * 2
    assert tree.rewards == {
        "node 0": 0.5,
        "node 0 format": 0.5,
        "whole": 0.0,
        "whole exact_match": 0.0,
        "whole overlong": -0.25,
    }
    assert greedy.logprobs.tolist() == [0, 0, 0, -0.125, -0.0625]
    assert (empty.token_ids.tolist(), empty.versions.tolist()) == ([6], [none])


def test_a_dump_of_today_is_read_by_the_code(tmp_path: Path) -> None:
    """A sample of one turn and one of two, with a tool's answer between."""
    one = sample(
        sample_id(7, 0),
        node([9, 2], logprobs=[-0.5, -0.0], versions=[Version("a", 3), Version("b", 4)]),
        score=1.0,
    )
    two = sample(
        sample_id(7, 1),
        node([8]),
        node([30, 31], [0, 0], parent=0, logprobs=0.0),
        node([11], parent=1, logprobs=-2.0, versions=Version("b", 4)),
        rewards=(
            TurnReward(0, 0.5, {"format": 0.5}),
            TurnReward(WHOLE, -0.0, {"exact_match": -0.0}),
            TurnReward(WHOLE, 0.25, {"bonus": 0.25}),
        ),
    )
    single = write_dump(tmp_path / "dumps", 1, V0, [group(one, ids=(4, 13))])
    both = write_dump(tmp_path / "dumps", 2, V0, [group(one, two, ids=(4, 13))])
    for found in (
        *read_current(single),
        *read_samples(single),
        *read_current(both)[:1],
        *read_samples(both)[:1],
    ):
        assert (found.id, found.token_ids.tolist()) == ("0/7/0", [4, 13, 9, 2])
        assert found.mask.tolist() == [False, False, True, True]
        assert found.logprobs.tobytes() == np.array([0, 0, -0.5, -0.0], np.float32).tobytes()
        assert found.versions.tolist() == [NO_VERSION, NO_VERSION, 3, 4]
        assert found.rewards == {"whole": 1.0, "whole exact_match": 1.0}
    for found in (read_current(both)[1], read_samples(both)[1]):
        assert found.token_ids.tolist() == [4, 13, 8, 30, 31, 11]
        assert found.mask.tolist() == [False, False, True, False, False, True]
        assert found.logprobs.tolist() == [0, 0, -1, 0, 0, -2]
        assert found.versions.tolist() == [NO_VERSION] * 2 + [0] + [NO_VERSION] * 2 + [4]
        assert found.rewards == {
            "node 0": 0.5,
            "node 0 format": 0.5,
            "whole": 0.25,
            "whole exact_match": 0.0,
            "whole bonus": 0.25,
        }
        assert np.signbit(found.rewards["whole exact_match"])
