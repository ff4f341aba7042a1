"""Shows a run's progress: live on a terminal, otherwise at most one line per second."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from atoll.cli.display.charts import sparkline
from atoll.cli.display.summary import VALIDATION, clock, is_result
from atoll.coordinator.algorithm.metrics import SCORE
from atoll.coordinator.control import RunState
from atoll.runtime.clients.coordinator import CoordinatorClient, statuses
from atoll.runtime.telemetry import METRICS_FILE, load_metrics
from atoll.wire.info import RunStatus
from atoll.wire.types import ServerHealth

LINE_EVERY_S = 1.0

RATE_STEPS = 20  # the time left is judged by
TREND_STEPS = 30  # in a sparkline
STALENESS = "staleness/mean"  # 0 in synchronous runs

# Headline metrics: label, metric, format.
HEADLINES = (
    ("reward", SCORE, "{:.3f}"),
    ("sampled reward", "warmup/score/mean", "{:.3f}"),
    ("loss", "actor/pg_loss", "{:+.4f}"),
    ("loss", "actor/nll_loss", "{:.4f}"),  # supervised
    ("length", "response_length/mean", "{:.1f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("staleness", STALENESS, "{:.2f}"),
)
LOSSES = (  # of a step's samples: label, metric
    ("dropped for want of a reward", "reward/dropped"),
    ("graded again", "reward/retried"),
    ("groups filtered", "dynamic_sampling/num_filtered"),
    ("batches refused", "training/num_refused"),
)
TIMING = "timing_s/"
WITHOUT_MODEL = ("reward", "gateway", "agents")  # services

Show = Callable[[RunStatus], None]


async def follow(client: CoordinatorClient, show: Show) -> None:
    """Shows every change of the run's status until cancelled. Waits for the coordinator's next change of
    state.
    """
    async for status in statuses(client):
        show(status)


@contextmanager
def view(folder: Path, expected: Sequence[str]) -> Iterator[Show]:
    """`folder`: of the run, which may have rows of earlier starts. `expected`: names of its services."""
    console = Console()
    if not console.is_terminal:
        yield _line_printer(console, expected)
        return
    display = Display(load_metrics(folder) if (folder / METRICS_FILE).exists() else [], expected)
    with Live(console=console, get_renderable=lambda: display.render(console.width), refresh_per_second=2):
        yield display.show


class Display:
    """A run's progress on a terminal: the last status, and what earlier ones say of its trend."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, float]],
        expected: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rows`: of steps before this start. `clock` counts seconds."""
        self._expected = expected
        self._clock = clock
        self._status: RunStatus | None = None
        self._seen_at = 0.0
        self._rows = {int(row["step"]): row for row in rows}
        self._ends: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS)  # steps of this start, seconds

    def show(self, status: RunStatus) -> None:
        if status.metrics:
            self._rows[status.step] = status.metrics
            last = self._ends[-1][0] if self._ends else -1
            if status.step < last:  # after a warm-up, or back at a checkpoint
                self._ends.clear()
            if status.step != last:
                self._ends.append((status.step, status.seconds))
        self._status, self._seen_at = status, self._clock()

    def render(self, width: int) -> Group:
        """For a console of `width` columns."""
        status = self._status
        if status is None:
            return Group("starting the coordinator")
        has_ended = status.state in (RunState.FINISHED.value, RunState.FAILED.value)
        seconds = status.seconds + (0.0 if has_ended else self._clock() - self._seen_at)
        head = Table.grid(padding=(0, 2))
        if status.num_steps:
            left = None if has_ended else self._seconds_left(status)
            head.add_row(
                f"step {status.step}/{status.num_steps}",
                ProgressBar(total=status.num_steps, completed=status.step, width=min(30, width - 40)),
                clock(seconds) + ("" if left is None else f", {clock(left)} left"),
            )
        else:
            head.add_row(clock(seconds))
        body = Table.grid(padding=(0, 2))
        for label, text in self._body(status, width):
            body.add_row(label, text)
        return Group(f"[bold]{escape(status.run)}[/]  {status.state}", head, body)

    def _body(self, status: RunStatus, width: int) -> Iterator[tuple[str, str]]:
        rows = [self._rows[step] for step in sorted(self._rows) if step <= status.step]
        for name in [SCORE, *sorted({name for row in rows for name in row if is_result(name)})]:
            if values := [row[name] for row in rows if name in row]:
                best = min(values) if name.endswith("/nll") else max(values)
                trend = sparkline(values[-TREND_STEPS:], min(TREND_STEPS, width - 40))
                label = "reward" if name == SCORE else name.removeprefix(VALIDATION)
                yield label, f"[bold]{values[-1]:.3f}[/]  {trend}  best {best:.3f}"
        headlines = [entry for entry in _headlines(status.metrics) if entry[0] != "reward"]
        if headlines:
            yield "metrics", "  ".join(f"{label} [bold]{value}[/]" for label, value in headlines)
        if losses := _losses(status.metrics):
            yield "samples", f"[yellow]{losses}[/]"
        if timings := _timings(status.metrics):
            yield "seconds", "  ".join(f"{name} {value:.2f}" for name, value in timings)
        if waiting := _waiting(status, self._expected):
            yield "waiting for", waiting
        if there := "  ".join(entry.name for entry in status.services):
            yield "services", there
        for health in status.servers:
            how = "healthy" if health.healthy else f"[red]unhealthy[/]: {escape(health.cause)}"
            yield "server", f"{escape(_place(health))}  {how}"
        if note := _note(status):
            yield "note", escape(note)

    def _seconds_left(self, status: RunStatus) -> float | None:
        """By the speed of the last steps; None until two have ended."""
        if len(self._ends) < 2:
            return None
        (first, begun), (last, ended) = self._ends[0], self._ends[-1]
        return (status.num_steps - last) * (ended - begun) / (last - first)


def line(status: RunStatus) -> str:
    """The status as one line of text."""
    words = [f"step {status.step}/{status.num_steps}"] if status.num_steps else []
    words += [status.state, *(f"{label} {value}" for label, value in _headlines(status.metrics))]
    words += [
        f"{name.removeprefix(VALIDATION)} {value:.3f}"
        for name, value in sorted(status.metrics.items())
        if is_result(name)
    ]
    if losses := _losses(status.metrics):
        words.append(losses)
    if timings := _timings(status.metrics):
        words.append("seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in timings))
    words += [f"unhealthy: {_place(health)}" for health in status.servers if not health.healthy]
    return "  ".join(words)


def _line_printer(console: Console, expected: Sequence[str]) -> Show:
    last, state, printed_at = "", "", -LINE_EVERY_S

    def show(status: RunStatus) -> None:
        nonlocal last, state, printed_at
        waiting = _waiting(status, expected)
        parts = [line(status), waiting and f"waiting for {waiting}", _note(status)]
        text, now = "  ".join(filter(None, parts)), time.monotonic()
        if text != last and (status.state != state or now - printed_at >= LINE_EVERY_S):
            last, state, printed_at = text, status.state, now
            stamp = time.strftime("%H:%M:%S")
            console.print(f"{stamp}  {text}", soft_wrap=True, highlight=False, markup=False)

    return show


def _waiting(status: RunStatus, expected: Sequence[str]) -> str:
    """Services that a run that is starting waits for, those with a model first; "" later."""
    if status.state != RunState.STARTING.value:
        return ""
    there = {entry.name for entry in status.services}
    missing = [name for name in expected if name not in there]
    loading = [name for name in missing if name.partition("-")[0] not in WITHOUT_MODEL]
    others = [name for name in missing if name not in loading]
    return ", ".join([f"{name} (loads its model)" for name in loading] + others)


def _losses(metrics: Mapping[str, float]) -> str:
    """What was lost or repeated in the last step; "" if nothing was."""
    return ", ".join(f"{metrics[key]:.0f} {label}" for label, key in LOSSES if metrics.get(key))


def _note(status: RunStatus) -> str:
    """Why it waits, pauses or recovers. The command itself reports failures."""
    return "" if status.state == "failed" else status.error


def _place(health: ServerHealth) -> str:
    return f"{health.server.kind} {health.server.name} at {health.server.url}"


def _headlines(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [
        (label, form.format(metrics[key]))
        for label, key, form in HEADLINES
        if key in metrics and (metrics[key] or key != STALENESS)
    ]


def _timings(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Phases that take long enough to be seen."""
    timings = (
        (key.removeprefix(TIMING), value) for key, value in sorted(metrics.items()) if key.startswith(TIMING)
    )
    return [(name, value) for name, value in timings if value >= 0.005]
