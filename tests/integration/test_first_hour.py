"""docs/first_hour.md, as a newcomer follows it: its files are saved and its commands run in an empty folder,
in a fresh environment with the wheel and its extra `cpu`.

FIRST_HOUR=whole runs the quickstart to its target; without, it ends after 30 steps.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from tests.wheel import ROOT, build_source_distribution, build_wheel

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "first_hour.md"
QUICKSTART = "atoll quickstart --set run.name=sums"
IS_WHOLE = os.environ.get("FIRST_HOUR") == "whole"


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The language and text of each block of code that has a language."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        yield match[1], match[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shell in which the wheel is installed, without anything of this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    build_source_distribution(folder)
    wheel = build_wheel(folder)
    subprocess.run((sys.executable, "-m", "venv", folder / "venv"), check=True)
    install = ("pip", "install", "--quiet", "--disable-pip-version-check", f"atoll[cpu] @ {wheel.as_uri()}")
    subprocess.run((folder / "venv" / "bin" / "python", "-m", *install), check=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_the_first_hour(tmp_path: Path, environment: dict[str, str]) -> None:
    page = PAGE.read_text()
    assert page.count(QUICKSTART) == 1
    if not IS_WHOLE:
        page = page.replace(QUICKSTART, f"{QUICKSTART} --set run.steps=30")
    output = ""
    for language, text in blocks(page):
        if language == "sh":
            shell = ("bash", "-euxo", "pipefail", "-c", text)
            done = subprocess.run(
                shell, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, timeout=1200
            )
            print(done.stdout)
            assert done.returncode == 0, text
            output += done.stdout
        else:
            name, _, content = text.removeprefix("# ").partition("\n")
            (tmp_path / name).write_text(content)

    scores = rewards(tmp_path, "differences")
    assert len(scores) == 60
    assert fmean(scores[30:40]) > fmean(scores[:10]) + 0.1  # before it was resumed
    if IS_WHOLE:
        assert fmean(rewards(tmp_path, "sums")[-10:]) > 0.7
    assert len(rewards(tmp_path, "narrow")) == 80  # with the history of the run that it was forked from
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"data", "sums", "differences", "narrow"}  # "slower" was removed
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 32 * 8
    assert all(re.fullmatch(r"\d\d-\d\d=", line["prompt"]) for line in lines)
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
    assert re.search(r"^57-23=\d+$", output, re.MULTILINE)  # by transformers


def rewards(folder: Path, run: str) -> list[float]:
    """Mean reward of each training step that the run made."""
    rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
