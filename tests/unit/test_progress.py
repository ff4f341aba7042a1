"""What a reader sees of a status."""

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from atoll.cli.display.progress import Display, follow, line, view
from atoll.cli.status import describe
from atoll.runtime.errors import AtollError, ServiceUnavailableError
from atoll.wire.info import RunStatus
from atoll.wire.types import ExternalServer, ServerHealth, ServiceEntry


def test_a_line_has_what_matters_in_the_order_that_matters() -> None:
    metrics = {
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 0.25,
        "timing_s/step": 0.8,
        "critic/score/mean": 0.3125,
        "perf/throughput": 1234.5,
        "staleness/mean": 0.0,
        "val/sums/avg@1": 0.5,
        "val/sums/response_length/mean": 9.0,
        "actor/grad_norm": 9.0,
    }
    status = RunStatus("toy", "training", 3, 10, 4, "", (), metrics, 7, ())
    assert line(status) == (
        "step 3/10  training  reward 0.312  tokens/s 1,234  sums/avg@1 0.500  "
        "seconds: gen 0.50, step 0.80, update_actor 0.25"
    )


def test_a_run_that_has_not_begun_has_no_metrics() -> None:
    assert line(RunStatus("toy", "starting", 0, 10, 0, "", (), {}, 1, ())) == "step 0/10  starting"
    assert line(RunStatus("toy", "starting", 0, 0, 0, "", (), {}, 1, ())) == "starting"


def test_what_is_not_trivial_is_shown() -> None:
    metrics = {
        "staleness/mean": 0.5,
        "reward/dropped": 3.0,
        "reward/retried": 12.0,
        "training/num_refused": 0.0,
        "timing_s/adv": 0.001,
        "timing_s/gen": 0.5,
    }
    assert line(RunStatus("toy", "training", 3, 10, 4, "", (), metrics, 7, ())) == (
        "step 3/10  training  staleness 0.50  3 dropped for want of a reward, 12 graded again  "
        "seconds: gen 0.50"
    )


EXPECTED = ("actor-0", "rollout-0", "rollout-1", "reward-0")
ROLLOUT = ServiceEntry("rollout", "rollout-0", "a1", "127.0.0.1:1")


def shown(display: Display, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(display.render(width))
    return [text.rstrip() for text in captured.get().splitlines()]


def test_a_start_shows_what_it_waits_for_and_no_bar() -> None:
    now = iter([10.0, 13.0])
    display = Display([], EXPECTED, clock=lambda: next(now))
    assert shown(display) == ["starting the coordinator"]
    display.show(RunStatus("toy", "starting", 0, 0, 0, "", (ROLLOUT,), {}, 1, (), 2.5))
    assert shown(display) == [
        "toy  starting",
        "0:05",  # 2.5 s when it was seen, 3 s ago
        "waiting for  actor-0 (loads its model), rollout-1 (loads its model), reward-0",
        "services     rollout-0",
    ]


def training(step: int, score: float, seconds: float) -> RunStatus:
    metrics = {"critic/score/mean": score, "actor/pg_loss": 0.25, "timing_s/step": 2.0}
    return RunStatus("toy", "training", step, 100, step, "", (ROLLOUT,), metrics, step, (), seconds)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_step_shows_trend_best_and_time_left(width: int) -> None:
    rows = [{"step": 1, "critic/score/mean": 0.0}, {"step": 2, "critic/score/mean": 1.0}]
    display = Display(rows, EXPECTED, clock=lambda: 0.0)
    display.show(training(3, 0.5, 20.0))
    display.show(training(3, 0.5, 21.0))  # another report of the same step
    display.show(training(5, 0.75, 26.0))
    title, bar, *body = shown(display, width)
    assert title == "toy  training"
    assert bar.split()[:2] == ["step", "5/100"]
    assert bar.endswith("0:26, 4:45 left")  # 95 steps of 3 s
    assert body == [
        "reward    0.750  ▁█▅▆  best 1.000",
        "metrics   loss +0.2500",
        "seconds   step 2.00",
        "services  rollout-0",
    ]


def test_the_clock_stops_with_the_run() -> None:
    now = iter([10.0, 15.0])
    display = Display([], EXPECTED, clock=lambda: next(now))
    display.show(replace(training(100, 0.5, 61.0), state="finished"))
    assert shown(display)[1].endswith("1:01")


def test_rows_of_steps_that_a_resume_repeats_are_not_shown() -> None:
    rows = [{"step": step, "critic/score/mean": 1.0} for step in range(1, 9)]
    display = Display(rows, EXPECTED, clock=lambda: 0.0)
    display.show(training(3, 0.5, 20.0))
    assert "reward    0.500  ██▁  best 1.000" in shown(display)


def test_lines_of_a_log_have_the_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with view(tmp_path, EXPECTED) as show:
        show(RunStatus("toy", "starting", 0, 0, 0, "", (ROLLOUT,), {}, 1, ()))
    stamp, text = capsys.readouterr().out.strip().split("  ", 1)
    assert time.strptime(stamp, "%H:%M:%S")
    assert text == "starting  waiting for actor-0 (loads its model), rollout-1 (loads its model), reward-0"


def test_servers_are_shown_with_their_health() -> None:
    well = ServerHealth(ExternalServer("tool", "search", "http://a", "mcp"), True)
    unhealthy = ServerHealth(ExternalServer("reward", "judge", "http://b", "http"), False, "no answer")
    status = RunStatus("toy", "training", 3, 10, 4, "", (), {}, 7, (well, unhealthy))
    assert line(status) == "step 3/10  training  unhealthy: reward judge at http://b"
    assert [text.split() for text in describe(status).splitlines()[1:]] == [
        ["tool", "search", "http://a", "healthy"],
        ["reward", "judge", "http://b", "unhealthy:", "no", "answer"],
    ]


async def test_progress_goes_on_after_a_call_that_failed() -> None:
    first, second = (RunStatus("toy", "training", step, 10, step, "", (), {}, step, ()) for step in (1, 2))

    class Client:
        answers: ClassVar = [first, ServiceUnavailableError("no answer within 10 s"), second]

        async def status(self, seen: int) -> RunStatus:
            if not self.answers:
                raise AtollError("the test ends here")
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    seen: list[int] = []
    with pytest.raises(AtollError, match="the test ends here"):
        await follow(Client(), lambda status: seen.append(status.step))
    assert seen == [1, 2]
