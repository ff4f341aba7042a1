"""What holds for the package as a whole: how its modules import each other, how folders are filled, what the
wheel contains and what `import atoll` offers."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import atoll
from atoll.reward.verifiers.exact_match import exact_match
from tests import module_list
from tests.wheel import PIP, build_source_distribution, build_wheel, tracked_files

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services"
MAX_MODULES = 15  # of a folder: more is a list to search in
MAX_LINES, MAX_FUNCTION_LINES = 400, 80


def modules() -> dict[str, Path]:
    """The package's own modules by name; generated code is left out."""
    files = [file for file in PACKAGE.rglob("*.py") if PACKAGE / "wire" / "v1" not in file.parents]
    return {_name(file): file for file in files}


def _name(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("atoll", *(part for part in parts if part != "__init__")))


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports anywhere in it, also within functions and for type checkers alone."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    assert {"atoll", "atoll.config.schema", "atoll.trainer.losses.loss"} <= known.keys()
    graph = {name: set(imported(file, known)) for name, file in known.items()}
    assert "atoll.config.schema" in graph["atoll.config.rules"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        pytest.fail(f"{' -> '.join(reversed(circle))}: take one of these imports out")


def test_only_the_package_itself_imports_for_type_checkers_alone() -> None:
    """Such an import hides a circle. The package offers its names lazily, and says with one what they are."""
    hidden = [name for name, file in modules().items() if "TYPE_CHECKING" in file.read_text()]
    assert hidden == ["atoll"]


@pytest.mark.parametrize("service", ["coordinator", "trainer"])
def test_no_folder_has_more_modules_than_one_sees_at_a_glance(service: str) -> None:
    files = [file for file in (PACKAGE / service).rglob("*.py") if file.name != "__init__.py"]
    counts = Counter(str(file.parent.relative_to(PACKAGE)) for file in files)
    assert counts[service] > 1
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_import_atoll_loads_nothing_that_is_slow() -> None:
    script = """
import sys
import atoll
assert not {"torch", "grpc", "numpy", "pydantic", "atoll.wire.types"} & set(sys.modules)
from atoll import AgentSession, Grade, ScoreItem, Trajectory, load_config
import atoll.agents.session, atoll.config.load, atoll.wire.types as types
assert (Grade, ScoreItem, Trajectory) == (types.Grade, types.ScoreItem, types.Trajectory)
assert atoll.Grade is Grade
assert AgentSession is atoll.agents.session.AgentSession
assert load_config is atoll.config.load.load
assert not {"torch", "grpc"} & set(sys.modules)
assert all(hasattr(atoll, name) for name in atoll.__all__)
assert atoll.read_samples is sys.modules["atoll.runtime.samples"].read_samples
assert atoll.run is sys.modules["atoll.cli.run"].follow_to_end
assert "torch" not in sys.modules
assert not hasattr(atoll, "grade")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_commands_for_containers_load_little() -> None:
    script = """
import sys
import atoll.cli.main, atoll.cli.health
assert not {"numpy", "pydantic", "atoll.config.schema", "atoll.wire.types"} & set(sys.modules)
import atoll.cli.config
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_grader_is_tested_with_what_it_reads() -> None:
    assert exact_match(atoll.ScoreItem(response="4", ground_truth="4")) == 1.0
    assert exact_match(atoll.ScoreItem(response="5", ground_truth="4")) == 0.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel of this tree's source distribution, and a stranger's package by the
    name of our folder."""
    assert (ROOT / "atoll").readlink() == Path("services")
    folder, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("target")
    unpacked = build_source_distribution(folder)
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    expected = {name.replace("services/", "atoll/", 1) for name in tracked_files()}
    assert expected - packed == {".gitignore", "atoll", "atoll/examples"}
    wheel = build_wheel(folder)
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {name.partition("/")[0] for name in names} == {"atoll", about}
    examples = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*") if path.is_file()}
    assert {f"atoll/{name}" for name in examples if "__pycache__" not in name} <= names
    assert not [name for name in names if name.endswith(".pyc")]
    subprocess.run((*PIP, "install", "--no-index", "--no-deps", "--target", target, wheel), check=True)
    (target / "services").mkdir()
    (target / "services" / "__init__.py").write_text("OWNER = 'a stranger'\n")
    return target


def run_beside(installed: Path, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """What the interpreter prints in an environment in which `installed` comes before this checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_the_wheel_leaves_a_package_named_services_alone(installed: Path) -> None:
    script = "import atoll.cli.main, services; print(atoll.cli.main.__file__, services.OWNER, sep='\\n')"
    lines = run_beside(installed, "-c", script).splitlines()
    assert lines == [str(installed / "atoll" / "cli" / "main.py"), "a stranger"]


def test_the_wheel_runs_the_quickstart_in_an_empty_folder_beside_a_dead_proxy(
    installed: Path, tmp_path: Path
) -> None:
    """Three steps after one of warm-up, then the examples for runs of one's own."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:1")
    settings = ("run.steps=3", "run.name=first", "warmup.steps=1")
    words = [word for setting in settings for word in ("--set", setting)]
    command = ("-m", "atoll.cli.main")
    run_beside(installed, *command, "quickstart", *words, cwd=tmp_path, **proxies)
    assert json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())["steps"] == 3
    run_beside(installed, *command, "examples", cwd=tmp_path)
    dry = run_beside(installed, *command, "run", "examples/grpo.toml", "--dry-run", cwd=tmp_path)
    assert json.loads(dry)["run"]["name"] == "grpo"


USERS_OWN = """
from atoll import AgentSession, Grade, Sample, ScoreItem, Trajectory, load_config, read_samples, run
from pathlib import Path
from typing import assert_type


def grader(item: ScoreItem, *, wanted: str = "") -> float | Grade:
    assert_type(item.response, str)
    return Grade(0.0, "none") if not item.response else float(item.response == (wanted or item.ground_truth))


def total(sample: Trajectory) -> float:
    return sample.score


def worst(folder: Path) -> Sample:
    return min(read_samples(folder, step=3, set="sums"), key=lambda sample: sample.score)


async def agent(session: AgentSession) -> None:
    assert_type(session.ground_truth, str)
    await session.reward(1.0)


def main() -> int:
    assert_type(load_config(Path("run.toml"), ["run.steps=2"]).run.steps, int)
    return run(load_config(Path("run.toml")))
"""


def test_names_for_users_are_typed(installed: Path, tmp_path: Path) -> None:
    mypy = ("-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path / "cache"))
    (tmp_path / "good.py").write_text(USERS_OWN)
    run_beside(installed, *mypy, str(tmp_path / "good.py"))
    (tmp_path / "bad.py").write_text("from atoll import Grade, Grads\nGrade('1')\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run_beside(installed, *mypy, str(tmp_path / "bad.py"))
    assert re.findall(r"\[([a-z-]+)\]", raised.value.stdout) == ["attr-defined", "arg-type"]


def test_no_two_classes_share_a_name() -> None:
    """Nested and private classes count, too, and an underscore does not make another name."""
    places: dict[str, list[str]] = {}
    for module, file in modules().items():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{module}:{node.lineno}")
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_long_files_say_why_and_no_function_is_long() -> None:
    long_files, long_functions = [], []
    for name, file in modules().items():
        text = file.read_text()
        if len(text.splitlines()) > MAX_LINES and "long because" not in text:
            long_files.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                    long_functions.append(f"{name}.{node.name}")
    assert (long_files, long_functions) == ([], [])


def test_the_architecture_page_lists_every_module() -> None:
    page = module_list.PAGE.read_text()
    assert page == module_list.rewrite(page), "a module or its docstring changed: run `make docs`"


def test_files_that_pages_name_exist() -> None:
    folders = ("benchmarks", "deploy", "docs", "examples", "proto", "services", "tests")
    files = {f"/{file.relative_to(ROOT)}" for folder in folders for file in (ROOT / folder).rglob("*.*")}
    files |= {f"/{file.name}" for file in ROOT.iterdir()}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"`([\w./-]+\.(?:py|proto|sh|toml|md))(?:::\w+)?`", page.read_text())
    }
    assert len(named) > 100
    assert {(page, name) for page, name in named if not any(f.endswith(f"/{name}") for f in files)} == set()


def test_the_tasks_on_the_architecture_page_exist() -> None:
    page = module_list.PAGE.read_text()
    section = page[page.index("## The tasks of a run") : page.index("Back pressure")]
    tasks = set(re.findall(r"^\| `(\w+)\.(\w+)`", section, re.MULTILINE))
    assert len(tasks) > 10
    assert tasks <= {
        (node.name, method.name)
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
    }
