"""Paths that a trainer is asked to write or read."""

from pathlib import Path

import pytest

from atoll.runtime.errors import UserError
from atoll.trainer.folders import AllowedFolders


def test_only_what_is_below_the_runs_folder_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = AllowedFolders(Path("runs/toy"), (tmp_path / "exported",))
    for path in ("runs/toy/checkpoints/step-1/actor", f"{tmp_path}/runs/toy/warm", f"{tmp_path}/exported"):
        folders.check(path)
    outside = "runs/other", "/home", ".", "runs/toy", "runs/toy/../other", "runs/toy2", str(tmp_path)
    for path in outside:
        with pytest.raises(UserError, match=f"got path {path}, expected one below the run's folder"):
            folders.check(path)


def test_a_link_that_the_owner_made_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "scratch")
    AllowedFolders(tmp_path / "run").check(str(tmp_path / "run" / "checkpoints" / "step-1"))
