"""What people ask of a run, and when they are answered."""

import asyncio

from atoll.coordinator.control import RunControl


async def test_who_asked_for_a_checkpoint_that_is_abandoned_gets_the_next_one() -> None:
    control = RunControl(trains=True)
    first = asyncio.create_task(control.request_checkpoint())
    await asyncio.sleep(0)
    assert control.checkpoint_requested
    control.begin_checkpoint()
    assert not control.checkpoint_requested
    later = asyncio.create_task(control.request_checkpoint())
    await asyncio.sleep(0)
    control.requeue_checkpoint()  # a trainer died while it wrote
    assert control.checkpoint_requested
    control.begin_checkpoint()
    control.finish_checkpoint("step-000002")
    assert await asyncio.gather(first, later) == ["step-000002", "step-000002"]


async def test_who_asks_while_one_is_written_waits_for_the_next() -> None:
    control = RunControl(trains=True)
    first = asyncio.create_task(control.request_checkpoint())
    await asyncio.sleep(0)
    control.begin_checkpoint()
    later = asyncio.create_task(control.request_checkpoint())
    await asyncio.sleep(0)
    control.finish_checkpoint("step-000001")
    assert await first == "step-000001"
    assert control.checkpoint_requested
    assert not later.done()
    later.cancel()


def test_seconds_add_up_over_resumes_and_not_over_lost_trainers() -> None:
    now = iter([100.0, 130.0, 140.0])
    control = RunControl(trains=True, clock=lambda: next(now))
    control.continue_from(1000.0)
    assert control.seconds == 1030.0
    control.continue_from(1030.0)  # the loop begins again in this start, at a checkpoint of this start
    assert control.seconds == 1040.0
