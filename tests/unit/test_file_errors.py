"""Files that a command cannot use: each is one line on stderr, which names the file."""

from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.config.errors import ConfigError
from atoll.config.load import read_resolved
from tests.unit.test_config import TOY


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    Path("latin.toml").write_bytes("# Grüße".encode("latin-1"))
    Path("loop.toml").symlink_to("loop.toml")
    Path("cut").mkdir()
    Path("cut/config.json").write_text("{}")
    Path("cut/summary.json").write_text('{"run": ')


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("run .", ".: Is a directory; expected a file that you can read", 2),
        ("run latin.toml", "latin.toml: not UTF-8 at byte 4: save the file as UTF-8", 2),
        ("run loop.toml", "loop.toml: Too many levels of symbolic links; expected a file", 2),
        ("run toy.toml/x", "toy.toml/x: Not a directory; expected a file", 2),
        ("status cut", "cut/summary.json: not valid JSON: Expecting value: line 1 column 9", 2),
        ("examples --out cut", "cut exists: give a new folder with --out, or delete it", 2),
        ("examples --out toy.toml/new", "toy.toml/new: Not a directory", 1),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    words: str, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words.split()
    assert main([command, *rest]) == code
    assert capsys.readouterr().err.startswith(f"atoll {command}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json: not valid JSON: Expecting property name"),
        (b"\xff", r"\.json: not UTF-8 at byte 0"),
    ],
)
def test_a_runs_config_that_was_cut_off_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_resolved(path)
