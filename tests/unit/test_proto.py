"""The committed wire code is what the protos generate."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = Path("atoll/wire/v1")


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).with_name(f'protoc-gen-{name}')}"
        for name in ("mypy", "mypy_grpc")
    ]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto" / GENERATED).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *plugins, *protos]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / GENERATED).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / GENERATED).glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed), "run `make proto` and commit what it writes"
    for name in fresh:
        assert fresh[name] == committed[name], f"{name} differs: run `make proto` and commit what it writes"
