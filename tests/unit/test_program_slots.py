"""Which callers of the sandbox make room for others."""

from atoll.reward.sandbox.program_slots import SleepWatch


def test_a_caller_makes_room_once_all_programs_that_it_runs_sleep() -> None:
    calls: list[None] = []
    watch = SleepWatch(lambda: calls.append(None))
    with watch.program() as response_sleeps:
        with watch.program() as tests_sleep:
            tests_sleep()  # they wait for the response, which computes
            assert len(calls) == 0
            response_sleeps()
            assert len(calls) == 1
        assert len(calls) == 2  # the response alone, asleep
        with watch.program():
            pass
        assert len(calls) == 3
    assert len(calls) == 3  # nothing runs
    with watch.program(), watch.program() as second_sleeps:
        second_sleeps()
    assert len(calls) == 3  # the first one never slept
