"""Curves in a terminal and as SVG; comparisons of runs."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from atoll.cli.compare import Difference, differences
from atoll.cli.display.charts import bin_means, sparkline, terminal_chart
from atoll.cli.display.svg import svg
from atoll.cli.main import main
from atoll.runtime.telemetry import MetricsFile
from tests.builders import write_run


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.5, 7.0], 10) == "▁▂▃▅█"  # 3.5 is half way: block 4 of 0 to 7
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, 4) == "▁▁██"


def test_bins_hold_equally_many_values() -> None:
    assert bin_means([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 7.0]
    assert bin_means([1.0, 3.0], 5) == [1.0, 3.0]


def test_a_chart_has_its_curves_at_their_places() -> None:
    curves = {"up": [(0, 0.0), (9, 1.0)], "down": [(0, 1.0), (9, 0.0)]}
    assert terminal_chart("reward", curves, width=13, height=3).splitlines() == [
        "reward",
        "1 │○        ●",
        "  │          ",
        "0 │●        ○",
        "   0        9",
        "  ● up",
        "  ○ down",
    ]


def test_an_svg_has_a_line_for_each_run(tmp_path: Path) -> None:
    picture = ElementTree.fromstring(
        svg({"reward": {"a<b": [(0, 0.0), (10, 1.0)], "c": [(0, 0.5), (10, 0.5)]}})
    )
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.get("points") for line in picture.iter(f"{space}polyline")]
    # the area: x from 70 to 700, y from 36 (1.0) to 266 (0.0)
    assert lines == ["70.0,266.0 700.0,36.0", "70.0,151.0 700.0,151.0"]
    texts = [text.text for text in picture.iter(f"{space}text")]
    assert {"reward", "a<b", "c", "0.25", "2.5"} <= set(texts)


def test_plot_draws_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, 0.25, 0.5, 0.75)) for name in ("a", "b")]
    assert main(["plot", *runs]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("critic/score/mean\n")
    assert all(run in shown for run in runs)
    out = tmp_path / "x.svg"
    assert main(["plot", *runs, "--metric", "val/sums/avg@1", "--out", str(out)]) == 0
    assert out.read_text().count("<polyline") == 2
    assert main(["plot", runs[0], "--out", str(tmp_path / "x.png")]) == 2
    assert "ends with .svg" in capsys.readouterr().err


def test_an_unknown_metric_names_near_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(write_run(tmp_path, 0.25)), "--metric", "critic/score/maen"]) == 2
    assert "such as critic/score/mean" in capsys.readouterr().err


def test_settings_differ_by_their_dotted_names() -> None:
    old = {"run": {"name": "a", "steps": 5}, "data": {"train": [{"path": "x"}]}, "gone": 1}
    new = {"run": {"name": "a", "steps": 9}, "data": {"train": [{"path": "y"}]}}
    found = differences(old, new)
    assert found == [
        Difference("data.train", [{"path": "x"}], [{"path": "y"}]),
        Difference("gone", 1, None),
        Difference("run.steps", 5, 9),
    ]
    assert str(found[2]) == "run.steps: 5 -> 9"
    assert differences(old, old) == []


def test_compare_shows_what_went_in_and_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    a, b = write_run(tmp_path / "a", 0.0, 0.5, 0.75, 1.0), write_run(tmp_path / "b", 0.25, 0.25)
    tree = json.loads((b / "config.json").read_text())
    tree["trainer"]["optimizer"]["learning_rate"] = 0.5
    (b / "config.json").write_text(json.dumps(tree))
    with MetricsFile(b / "metrics.jsonl", last_step=2) as metrics:
        metrics.write(3, {"critic/score/mean": 0.75})
    assert main(["compare", str(a), str(b)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trainer.optimizer.learning_rate", "1e-06", "0.5"] in rows
    assert ["steps", "4", "3"] in rows
    assert ["reward,", "first", "0.250", "0.250"] in rows  # of two steps, and of one
    assert ["reward,", "last", "0.875", "0.750"] in rows
    assert ["reward,", "best", "1.000", "0.750"] in rows
    assert ["reward", "▁▅▆█", "▁▁█"] in rows
    assert ["sums/avg@1,", "best", "1.000", "0.750"] in rows  # 1 - reward
