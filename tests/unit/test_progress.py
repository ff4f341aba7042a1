"""What a reader sees of a status."""

from typing import ClassVar

import pytest

from atoll.cli.progress import follow, line
from atoll.cli.status import describe
from atoll.runtime.errors import AtollError, ServiceUnavailableError
from atoll.wire.info import RunStatus
from atoll.wire.types import ExternalServer, ServerHealth


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
        "step 3/10  training  reward 0.312  tokens/s 1,234  staleness 0.00  sums/avg@1 0.500  "
        "seconds: gen 0.50, step 0.80, update_actor 0.25"
    )


def test_a_run_that_has_not_begun_has_no_metrics() -> None:
    assert line(RunStatus("toy", "starting", 0, 10, 0, "", (), {}, 1, ())) == "step 0/10  starting"


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
