"""Curves in a terminal: one line of blocks, or a chart of several curves. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
MARKS = "●○◆◇■□▲△"  # one per curve of a chart

Curve = Sequence[tuple[float, float]]  # (x, y), ascending in x


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` blocks from the lowest value to the highest; longer series are averaged in bins.
    Equal values are the lowest block.
    """
    if not values:
        return ""
    binned = bin_means(values, width)
    low, high = min(binned), max(binned)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in binned)


def bin_means(values: Sequence[float], bins: int) -> list[float]:
    """The means of `bins` consecutive parts, equal up to one value; fewer values stay as they are."""
    if len(values) <= bins:
        return list(values)
    bounds = [len(values) * number // bins for number in range(bins + 1)]
    return [sum(values[first:last]) / (last - first) for first, last in pairwise(bounds)]


def limits(curves: Sequence[Curve]) -> tuple[float, float, float, float]:
    """Lowest and highest x, lowest and highest y of all points."""
    xs = [x for curve in curves for x, _ in curve]
    ys = [y for curve in curves for _, y in curve]
    return min(xs), max(xs), min(ys), max(ys)


def terminal_chart(title: str, curves: Mapping[str, Curve], width: int, height: int = 12) -> str:
    """Title, `height` rows of characters with the lowest and highest y at their left, lowest and highest x
    below, and a legend. A column shows the mean of the points that fall into it.
    """
    left, right, low, high = limits(list(curves.values()))
    label = max(len(f"{low:.4g}"), len(f"{high:.4g}"))
    columns = max(width - label - 2, 10)
    grid = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(_cycled(MARKS, len(curves)), curves.values(), strict=True):
        cells: dict[int, list[float]] = {}
        for x, y in curve:
            cells.setdefault(round((x - left) / ((right - left) or 1.0) * (columns - 1)), []).append(y)
        for column, ys in cells.items():
            share = (sum(ys) / len(ys) - low) / ((high - low) or 1.0)
            grid[height - 1 - round(share * (height - 1))][column] = mark
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    rows = [f"{text:>{label}} │{''.join(row)}" for text, row in zip(labels, grid, strict=True)]
    first, last = f"{left:g}", f"{right:g}"
    axis = " " * (label + 2) + first + last.rjust(columns - len(first))
    legend = [f"  {mark} {name}" for mark, name in zip(_cycled(MARKS, len(curves)), curves, strict=True)]
    return "\n".join([title, *rows, axis, *legend])


def _cycled(marks: str, count: int) -> list[str]:
    return [marks[number % len(marks)] for number in range(count)]
