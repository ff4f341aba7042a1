"""Tools of a coding agent: each call runs in the sandbox, with the session's files as working directory."""

import io
import unittest
from pathlib import Path


def list_files() -> str:
    """Lists all files, one per line."""
    return "\n".join(sorted(str(path) for path in Path().rglob("*") if path.is_file()))


def read_file(path: str) -> str:
    """Returns the text of a file."""
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Replaces the text of a file, or creates the file."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return f"{path} now has {len(text.splitlines())} lines."


def run_tests() -> str:
    """Runs the unit tests in all files test*.py, and returns what failed."""
    report = io.StringIO()
    unittest.TextTestRunner(report).run(unittest.defaultTestLoader.discover("."))
    return report.getvalue()
