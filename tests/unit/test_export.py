"""Which checkpoint `atoll export` takes."""

from pathlib import Path

import pytest

from atoll.cli.export import find_newest_checkpoint
from atoll.runtime.errors import UserError


def test_of_a_run_the_newest_by_number(tmp_path: Path) -> None:
    for step in ("step-000009", "step-000100", ".partial-000200"):
        (tmp_path / "checkpoints" / step / "actor").mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step-000100"
    assert find_newest_checkpoint(tmp_path) == newest
    older = tmp_path / "checkpoints" / "step-000009"
    assert find_newest_checkpoint(older) == older


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a checkpoint .* nor a run that has one"):
        find_newest_checkpoint(tmp_path)
