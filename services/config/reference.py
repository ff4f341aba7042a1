"""Prints docs/configuration.md: `make docs`. The text comes from the comments of the fields in schema.py."""

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import get_args, get_origin

from pydantic import BaseModel

from atoll.config.functions import built_in
from atoll.config.schema import FunctionConfig, RunConfig

HEAD = """# Configuration

A run is configured by one TOML file. `atoll run FILE --set a.b=c` overrides a setting. `--dry-run` prints the
resolved config with all defaults, as saved to `runs/NAME/config.json`. Unknown keys are rejected.
`base = "other.toml"` at the top of a file extends another file (path relative to this one).

Some settings take a function: a built-in one, or your own as `file.py:function`. `advantage = "gae"` uses the
default parameters, `advantage = { name = "gae", lam = 0.95 }` sets some. [algorithms.md](algorithms.md) lists
the parameters, and [rewards.md](rewards.md) those of graders.

`make docs` generates this page from `services/config/schema.py`.
"""

_COMMENT = re.compile(r"^    (?P<name>\w+): [^#\n]*(?:\(\n[^#\n]*)?  # (?P<comment>.*)$", re.MULTILINE)

# A setting has one row, although several sections may inherit it: by class and name, the path of the first
Shown = dict[tuple[type[BaseModel], str], str]


def document() -> str:
    return HEAD + "".join(f"\n{line}" for line in _section("", RunConfig, {})) + "\n"


def _section(path: str, section: type[BaseModel], shown: Shown) -> Iterator[str]:
    """The lines of a section: links to settings that have a row, a table of its other plain settings, then
    its sub-tables, each with a heading."""
    rows, tables = [], []
    elsewhere: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        owner = _owner(section, name)
        if owner is FunctionConfig:
            continue  # the text above the table has the names
        if (first := shown.setdefault((owner, name), path)) != path:
            elsewhere.setdefault(first, []).append(f"`{name}`")
            continue
        table = _table(field.annotation)
        if table and table.model_fields.keys() != {"name"}:
            tables.append((f"{path}.{name}".lstrip("."), field.annotation, table))
            continue
        default = "required" if field.is_required() else _shown(field.default)
        if table:  # a function, named instead of a table
            rows.append(f"| `{name}` | {default} | {_functions(table)} | {table.__doc__} |")
        else:
            values = " ".join(f"`{value}`" for value in get_args(field.annotation) if isinstance(value, str))
            rows.append(f"| `{name}` | {default} | {values} | {_comments(owner).get(name, '')} |")
    for first, names in elsewhere.items():
        yield from [f"As in [[{first}]](#{first.replace('.', '')}): {', '.join(names)}.", ""]
    if rows:
        yield from ["| setting | default | values | meaning |", "|---|---|---|---|", *rows, ""]
    for below, annotation, table in tables:
        yield f"## [[{below}]]" if get_origin(annotation) is tuple else f"## [{below}]"
        yield ""
        if table.__doc__:
            yield from [table.__doc__, ""]
        if functions := _functions(table):
            yield from [f"`name` is one of {functions}, or `file.py:function`.", ""]
        yield from _section(below, table, shown)


def _owner(section: type[BaseModel], name: str) -> type[BaseModel]:
    """The class that defines a field, of a section and those that it inherits from."""
    return next(base for base in section.__mro__ if name in inspect.get_annotations(base))


@cache
def _comments(section: type[BaseModel]) -> dict[str, str]:
    return {match["name"]: match["comment"] for match in _COMMENT.finditer(inspect.getsource(section))}


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
