"""Prints docs/configuration.md: `make docs`. The text comes from the comments of the fields in schema.py."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel

from atoll.config.functions import built_in
from atoll.config.schema import FunctionConfig, RunConfig, Section

HEAD = """# Configuration

A run is configured by one TOML file. `atoll run FILE --set a.b=c` overrides a setting; `--dry-run` prints
all of them with defaults filled in, as they are saved to `runs/NAME/config.json`. Unknown keys are rejected.
`base = "other.toml"` at the top of a file extends that file (path relative to this one).

Some settings name a function: a listed one, or your own as `file.py:function`. Its parameters stand
next to the name, `advantage = { name = "gae", lam = 0.95 }`; `advantage = "gae"` uses the defaults.
See [algorithms.md](algorithms.md) for parameters, and [rewards.md](rewards.md) for those of graders.

Written by `make docs` from `services/config/schema.py`.
"""

_COMMENT = re.compile(r"    (?P<name>\w+): .*  # (?P<comment>.*)")


def document() -> str:
    return HEAD + "".join(f"\n{line}" for line in _section("", RunConfig)) + "\n"


def _section(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    """The lines of a section: a table of its plain settings, then its sub-tables, each with a heading."""
    parents = (parent for parent in reversed(section.__mro__) if issubclass(parent, Section))
    source = [line for parent in parents for line in inspect.getsource(parent).splitlines()]
    comments = {match["name"]: match["comment"] for line in source if (match := _COMMENT.fullmatch(line))}
    rows, tables = [], []
    for name, field in section.model_fields.items():
        table = _table(field.annotation)
        if table and table.model_fields.keys() != {"name"}:
            tables.append((f"{prefix}{name}", field.annotation, table))
            continue
        default = "required" if field.is_required() else _shown(field.default)
        if table:  # a function, named instead of a table
            rows.append(f"| `{name}` | {default} | {_functions(table)} | {table.__doc__} |")
        else:
            values = " ".join(f"`{value}`" for value in get_args(field.annotation) if isinstance(value, str))
            rows.append(f"| `{name}` | {default} | {values} | {comments.get(name, '')} |")
    if rows:
        yield from ["| setting | default | values | |", "|---|---|---|---|", *rows, ""]
    for path, annotation, table in tables:
        yield f"## [[{path}]]" if get_origin(annotation) is tuple else f"## [{path}]"
        yield ""
        if table.__doc__:
            yield from [table.__doc__, ""]
        if functions := _functions(table):
            yield from [f"`name` is one of {functions}, or `file.py:function`.", ""]
        yield from _section(f"{path}.", table)


def _functions(table: type[BaseModel]) -> str:
    """Names of the built-in functions that a table may name; empty for other tables."""
    return " ".join(f"`{name}`" for name in built_in(table.kind)) if issubclass(table, FunctionConfig) else ""


def _shown(default: object) -> str:
    if isinstance(default, FunctionConfig):
        return _shown(default.name)
    return "unset" if default is None else f"`{json.dumps(default, default=str)}`"


def _table(annotation: object) -> type[BaseModel] | None:
    """The section in a field, in its list, or in its optional value."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


if __name__ == "__main__":
    print(document(), end="")
