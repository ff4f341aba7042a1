"""Prints docs/configuration.md: `make docs`. The comments beside the fields of schema.py are the text."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel

from atoll.config.functions import built_in
from atoll.config.schema import FunctionConfig, RunConfig

HEAD = """# Configuration

A run is one TOML file. `atoll run FILE --set a.b=c` overrides a setting, `--dry-run` prints all of them,
defaults filled in, and the same goes to `runs/NAME/config.json`. Unknown keys are refused.
`base = "other.toml"`, at the top of a file, reads that one first (relative to this one) and changes it.

Some settings name a function: one of those listed, or `file.py:function` of your own. Its parameters stand
beside the name, `advantage = { name = "gae", lam = 0.95 }`, and `advantage = "gae"` takes their defaults;
[algorithms.md](algorithms.md) has them, [rewards.md](rewards.md) those of graders.

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
        table = _table(field.annotation)
        if table and table.model_fields.keys() != {"name"}:
            tables.append((f"{prefix}{name}", field.annotation, table))
            continue
        default = "required" if field.is_required() else _shown(field.default)
        if table:  # a function, whose name stands for its table
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
    """The names of the built-in functions that a table may name; empty for a table of another sort."""
    return " ".join(f"`{name}`" for name in built_in(table.kind)) if issubclass(table, FunctionConfig) else ""


def _shown(default: object) -> str:
    if isinstance(default, FunctionConfig):
        return _shown(default.name)
    return "unset" if default is None else f"`{json.dumps(default, default=str)}`"


def _table(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, or holds a list of, or may hold."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


if __name__ == "__main__":
    print(document(), end="")
