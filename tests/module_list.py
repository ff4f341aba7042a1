"""Rewrites the list of modules in docs/architecture.md: `python -m tests.module_list`, as `make docs` does.

The first sentence of each module's docstring, below the folder that it is in.
"""

import ast
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "services"
HEADING = "## Modules\n"


def list_modules() -> str:
    paths = sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and "v1" not in path.relative_to(PACKAGE).parts
    )
    return "\n".join(
        f"`services/{folder.relative_to(PACKAGE)}/`\n\n"
        + "".join(f"- `{path.name}`: {first_sentence(path)}\n" for path in modules)
        for folder, modules in groupby(sorted(paths, key=lambda p: (p.parent, p.name)), lambda p: p.parent)
    )


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    paragraph = docstring.split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[a-z\d)`\]]\.) (?=[A-Z`])", paragraph)[0]


def rewrite(page: str) -> str:
    """The list follows its heading and ends the page."""
    before, heading, _ = page.partition(HEADING)
    assert heading, f"{PAGE} has no heading {HEADING.strip()!r}"
    return f"{before}{heading}\n{list_modules()}"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text()))
