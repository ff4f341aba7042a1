"""Charts of curves as an SVG file, without a plotting library. Pure."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from atoll.cli.display.charts import Curve, limits

WIDTH, HEIGHT = 720, 300  # of one chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 36, 34  # margins of its area
TICKS = 5  # per axis
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito


def svg(charts: Mapping[str, Mapping[str, Curve]]) -> str:
    """A chart below the other for each title, with the curves by name; none of them is empty."""
    legend = dict.fromkeys(name for curves in charts.values() for name in curves)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(legend)}
    height = HEIGHT * len(charts) + 20 * len(legend) + 10
    body = [_chart(title, curves, colours, HEIGHT * n) for n, (title, curves) in enumerate(charts.items())]
    for number, name in enumerate(legend):
        y = HEIGHT * len(charts) + 20 * number + 10
        body.append(f'<rect x="{LEFT}" y="{y - 6}" width="14" height="4" fill="{colours[name]}"/>')
        body.append(_text(LEFT + 22, y, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _chart(title: str, curves: Mapping[str, Curve], colours: Mapping[str, str], offset: int) -> str:
    left, right, low, high = limits(list(curves.values()))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    span_x, span_y = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - left) / span_x * width, offset + TOP + (1 - (y - low) / span_y) * height

    parts = [_text(LEFT, offset + TOP - 14, title, "start")]
    for number in range(TICKS):
        share = number / (TICKS - 1)
        x, y = place(left + share * span_x, low + share * span_y)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{low + share * span_y:.4g}", "end"))
        parts.append(_text(x, offset + HEIGHT - BOTTOM + 18, f"{left + share * span_x:.4g}", "middle"))
    for name, curve in curves.items():
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
    return "\n".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
