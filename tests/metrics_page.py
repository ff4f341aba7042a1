"""The names of metrics that docs/metrics.md explains."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
STANDS_FOR = {"NAME": "[^/]+", "REASON": "[^/]+", "SET": "[^/]+", r"\*": ".+", "@k": r"@\d+"}


def unexplained(metrics: Iterable[str]) -> set[str]:
    """Names that no row of the page's tables has."""
    tables = PAGE.read_text().partition("\n## All metrics\n")[2]
    cells = re.findall(r"^\| (`.*?`) \|", tables, re.MULTILINE)
    names = [name for cell in cells for written in re.findall(r"`(.+?)`", cell) for name in _expand(written)]
    assert "critic/score/mean" in names
    patterns = [_pattern(name) for name in names]
    return {name for name in metrics if not any(pattern.fullmatch(name) for pattern in patterns)}


def _expand(written: str) -> Iterator[str]:
    """val/{a,b} -> val/a, val/b."""
    head, brace, rest = written.partition("{")
    inside, _, tail = rest.partition("}")
    yield from (f"{head}{each}{tail}" for each in inside.split(",")) if brace else [written]


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name)
    for placeholder, anything in STANDS_FOR.items():
        pattern = pattern.replace(placeholder, anything)
    return re.compile(pattern)
