"""The folder of a session whose agent is a command: what is put there, and what graders get of it."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

MAX_FILES: Final = 200  # that graders get
MAX_FILE_BYTES: Final = 1 << 20
MAX_BYTES: Final = 4 << 20  # of all of them

WORKSPACE: Final = "workspace"  # where the program starts
HOME, TEMPORARY, TASK = "home", "tmp", "task.md"  # beside it


def lay_out(folder: Path, template: Path | None, files: Mapping[str, str], task: str) -> None:
    """Fills an empty folder: the workspace is a copy of the template with `files` on top, by relative path.

    Raises ValueError if a path leads out of the workspace.
    """
    for name in (HOME, TEMPORARY):
        (folder / name).mkdir()
    (folder / TASK).write_bytes(task.encode())
    workspace = folder.resolve() / WORKSPACE
    if template is None:
        workspace.mkdir()
    else:
        shutil.copytree(template, workspace, symlinks=True)
    for path, text in files.items():
        target = (workspace / path).resolve()
        if workspace not in target.parents:
            raise ValueError(f"extra_info.files: got {path!r}, expected a path inside the workspace")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())


def collect(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    """Text files of the workspace by relative path. Patterns are those of `Path.glob`.

    Leaves out what the agent may have put there to mislead: symbolic links, files that are not UTF-8 or too
    large, and those beyond the limits of all.
    """
    workspace = folder.resolve() / WORKSPACE
    texts: dict[str, str] = {}
    left_out, num_bytes = [], 0
    for path in sorted(set(_matching(workspace, patterns))):
        name = path.relative_to(workspace).as_posix()
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES or num_bytes + size > MAX_BYTES or len(texts) == MAX_FILES:
                raise ValueError("too much")
            texts[name] = path.read_bytes().decode()
            num_bytes += size
        except (OSError, ValueError):
            left_out.append(name)
    if left_out:
        _log.warning(
            "%s: graders do not get %d files, which are not text, unreadable or too large, such as %s",
            folder,
            len(left_out),
            left_out[0],
        )
    return texts


def _matching(workspace: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        for path in workspace.glob(pattern):
            if path.resolve() == path and path.is_file():
                yield path
