"""The wheel of this tree, built as a release is: from the source distribution."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def tracked_files() -> list[str]:
    """Relative to ROOT."""
    command = ("git", "ls-files")
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def build_source_distribution(folder: Path) -> Path:
    """Returns it unpacked, below `folder`."""
    source, packed = folder / "source", folder / "packed"
    packed.mkdir()
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # or it was removed, and is not committed
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(packed)!r})"
    subprocess.run((sys.executable, "-c", script), cwd=source, check=True, stdout=subprocess.DEVNULL)
    [archive] = packed.iterdir()
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return unpacked


def build_wheel(folder: Path) -> Path:
    """Builds it in `folder`, from the source distribution there."""
    [unpacked] = (folder / "unpacked").iterdir()
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run((*PIP, "wheel", *options, str(unpacked)), check=True)
    [wheel] = folder.glob("*.whl")
    return wheel
