"""Prints docs/configuration.md: `make docs`. The comments beside the fields of schema.py are the text."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel

from services.config.schema import RunConfig

HEAD = """# Configuration

A run is one TOML file. `atoll run FILE --set a.b=c` overrides a setting, `--dry-run` prints all of them,
defaults filled in, and the same goes to `runs/NAME/config.json`. Unknown keys are refused.

Written by `make docs` from `services/config/schema.py`.
"""

_COMMENT = re.compile(r"    (?P<name>\w+): .*  # (?P<comment>.*)")


def document() -> str:
    return HEAD + "".join(f"\n{line}" for line in _section("", RunConfig)) + "\n"


def _section(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    """The lines of a table of the plain settings, then those of the tables below, each under its heading."""
    source = inspect.getsource(section).splitlines()
    comments = {match["name"]: match["comment"] for line in source if (match := _COMMENT.fullmatch(line))}
    rows, tables = [], []
    for name, field in section.model_fields.items():
        if table := _table(field.annotation):
            tables.append((f"{prefix}{name}", field.annotation, table))
        else:
            default = "required" if field.is_required() else _shown(field.default)
            values = " ".join(f"`{value}`" for value in get_args(field.annotation) if isinstance(value, str))
            rows.append(f"| `{name}` | {default} | {values} | {comments.get(name, '')} |")
    if rows:
        yield from ["| setting | default | values | |", "|---|---|---|---|", *rows, ""]
    for path, annotation, table in tables:
        yield f"## [[{path}]]" if get_origin(annotation) is tuple else f"## [{path}]"
        yield ""
        if table.__doc__:
            yield from [table.__doc__, ""]
        yield from _section(f"{path}.", table)


def _shown(default: object) -> str:
    return "unset" if default is None else f"`{json.dumps(default, default=str)}`"


def _table(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, or holds a list of, or may hold."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


if __name__ == "__main__":
    print(document(), end="")
