"""Shows a run's progress: live on a terminal, otherwise at most one line per second."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from atoll.cli.summary import VALIDATION, is_result
from atoll.runtime.clients.coordinator import CoordinatorClient, statuses
from atoll.wire.info import RunStatus
from atoll.wire.types import ServerHealth

LINE_EVERY_S = 1.0

# Headline metrics: label, metric, format.
HEADLINES = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("sampled reward", "warmup/score/mean", "{:.3f}"),
    ("loss", "actor/pg_loss", "{:+.4f}"),
    ("loss", "actor/nll_loss", "{:.4f}"),  # supervised
    ("length", "response_length/mean", "{:.1f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("staleness", "staleness/mean", "{:.2f}"),
)
TIMING = "timing_s/"

Show = Callable[[RunStatus], None]


async def follow(client: CoordinatorClient, show: Show) -> None:
    """Shows every change of the run's status until cancelled. Waits for the coordinator's next change of
    state.
    """
    async for status in statuses(client):
        show(status)


@contextmanager
def view() -> Iterator[Show]:
    console = Console()
    if not console.is_terminal:
        yield _line_printer(console)
        return
    started = time.monotonic()
    validation: dict[str, float] = {}  # of the last validated step
    with Live(console=console, auto_refresh=False) as live:

        def show(status: RunStatus) -> None:
            validation.update({k: v for k, v in status.metrics.items() if k.startswith(VALIDATION)})
            picture = _picture(status, {**status.metrics, **validation}, time.monotonic() - started)
            live.update(picture, refresh=True)

        yield show


def line(status: RunStatus) -> str:
    """The status as one line of text."""
    words = [f"step {status.step}/{status.num_steps}", status.state]
    words += [f"{label} {value}" for label, value in _headlines(status.metrics)]
    if timings := _timings(status.metrics):
        words.append("seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in timings))
    words += [f"unhealthy: {_place(health)}" for health in status.servers if not health.healthy]
    return "  ".join(words)


def _line_printer(console: Console) -> Show:
    last, state, printed_at = "", "", -LINE_EVERY_S

    def show(status: RunStatus) -> None:
        nonlocal last, state, printed_at
        text, now = "  ".join(filter(None, [line(status), _note(status)])), time.monotonic()
        if text != last and (status.state != state or now - printed_at >= LINE_EVERY_S):
            last, state, printed_at = text, status.state, now
            console.print(text, soft_wrap=True, highlight=False, markup=False)

    return show


def _picture(status: RunStatus, metrics: Mapping[str, float], elapsed_s: float) -> Group:
    head = Table.grid(padding=(0, 2))
    minutes, seconds = divmod(int(elapsed_s), 60)
    head.add_row(
        f"[bold]{status.run}[/]",
        status.state,
        f"step {status.step}/{status.num_steps}",
        ProgressBar(total=status.num_steps, completed=status.step, width=30),
        f"{minutes}:{seconds:02}",
    )
    body = Table.grid(padding=(0, 2))
    body.add_row("metrics", "  ".join(f"{label} [bold]{value}[/]" for label, value in _headlines(metrics)))
    body.add_row("seconds", "  ".join(f"{name} {value:.2f}" for name, value in _timings(metrics)))
    body.add_row("services", "  ".join(entry.name for entry in status.services))
    for health in status.servers:
        how = "healthy" if health.healthy else f"[red]unhealthy[/]: {escape(health.cause)}"
        body.add_row("server", f"{escape(_place(health))}  {how}")
    if note := _note(status):
        body.add_row("note", escape(note))
    return Group(head, body)


def _note(status: RunStatus) -> str:
    """Why it waits, pauses or recovers. The command itself reports failures."""
    return "" if status.state == "failed" else status.error


def _place(health: ServerHealth) -> str:
    return f"{health.server.kind} {health.server.name} at {health.server.url}"


def _headlines(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    known = [(label, form.format(metrics[key])) for label, key, form in HEADLINES if key in metrics]
    validation = [
        (key.removeprefix(VALIDATION), f"{value:.3f}")
        for key, value in sorted(metrics.items())
        if is_result(key)
    ]
    return known + validation


def _timings(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        (key.removeprefix(TIMING), value) for key, value in sorted(metrics.items()) if key.startswith(TIMING)
    ]
