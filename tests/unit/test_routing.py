"""The routing policy, against figures worked by hand."""

import math

import numpy as np
import pytest

from atoll.coordinator.fleet import routing
from atoll.coordinator.fleet.routing import ContextWork, ReplicaLoad, Router
from atoll.wire.types import GroupId

LONGEST = 512  # tokens of a response, which count as the mean before one has finished


def work(number: int, num_samples: int = 8, prompt: object = (1, 2), session: str = "") -> ContextWork:
    return ContextWork(GroupId("toy", 0, number), np.array(prompt, np.int32), num_samples, LONGEST, session)


def measured(name: str, slots: int, rate: float) -> ReplicaLoad:
    """A seat that has finished one sample of `throughput` tokens in one second."""
    load = ReplicaLoad(name, slots)
    load.record_sent(1, 0, 0.0)
    load.record_finished(1, 0, round(rate), 1.0)
    return load


def counts(placed: list[tuple[ContextWork, ReplicaLoad]]) -> dict[str, int]:
    names = [load.name for _, load in placed]
    return {name: names.count(name) for name in sorted(set(names))}


def test_groups_go_where_they_end_first():
    """Of 12 groups at three times the speed, 9 and 3; an idle slow replica is not an early one."""
    loads = [measured("fast", 1000, 300), measured("slow", 1000, 100)]
    placed = Router().share([work(n) for n in range(12)], loads, 0.0)
    assert counts(placed) == {"fast": 9, "slow": 3}
    assert [load.name for _, load in placed[:3]] == ["fast", "fast", "fast"]


def test_before_a_measure_a_replica_counts_as_the_mean_of_the_others():
    loads = [measured("a", 1000, 300), measured("b", 1000, 100), ReplicaLoad("new", 1000)]  # 200 for it
    assert counts(Router().share([work(n) for n in range(12)], loads, 0.0)) == {"a": 6, "b": 2, "new": 4}


def test_a_replica_that_was_slow_once_is_tried_again():
    """At a tenth of the speed all goes to the other. A minute of the other's work later it counts like that
    one, unless it is at work itself."""
    router, fast, slow = Router(), measured("fast", 1000, 300), measured("slow", 1000, 30)
    assert counts(router.share([work(n) for n in range(10)], [fast, slow], 500.0)) == {"fast": 10}
    fast.record_finished(80, 20, 61 * 300, 561.0)
    slow.record_sent(8, 2, 561.0)
    assert router.share([], [fast, slow], 561.0) == []
    assert slow.throughput == 30
    slow.record_released(8, 2)
    placed = router.share([work(n) for n in range(10, 20)], [fast, slow], 561.0)
    assert counts(placed) == {"fast": 5, "slow": 5}


def test_load_is_counted_in_tokens():
    """A prompt of 4 * 8 * LONGEST tokens weighs as four more groups of eight responses."""
    loads = [ReplicaLoad("a", 1000), ReplicaLoad("b", 1000)]
    long = work(0, prompt=np.arange(4 * 8 * LONGEST))
    placed = Router().share([long, *(work(n) for n in range(1, 6))], loads, 0.0)
    assert [load.name for _, load in placed] == ["a", "b", "b", "b", "b", "b"]


def test_a_replica_takes_its_slots_and_what_it_finishes_in_a_second():
    """16 slots and 2 * LONGEST tokens a second: up to 18 samples, and the group that passes that."""
    unknown, known = ReplicaLoad("unknown", 16), measured("known", 16, 2 * LONGEST)
    router = Router()
    placed = router.share([work(n) for n in range(9)], [unknown, known], 0.0)
    assert counts(placed) == {"known": 3, "unknown": 2}  # 24 and 16 samples
    assert len(placed) == 5  # the rest waits
    known.record_finished(8, 2, 100, 2.0)
    assert router.share([work(9)], [unknown, known], 2.0) == []  # 16 in hand: all its slots are taken
    known.record_finished(1, 0.25, 100, 2.0)
    assert counts(router.share([work(9)], [unknown, known], 2.0)) == {"known": 1}


def test_throughput_forgets_and_ignores_the_tail_of_a_batch():
    load = ReplicaLoad("a", 64)
    load.record_sent(8, 0, now=100.0)
    assert load.throughput is None
    load.record_finished(2, 0, 1000, now=110.0)
    assert load.throughput == pytest.approx(100)
    load.record_finished(2, 0, 600, now=113.0)
    kept = math.exp(-3 / 60)
    tokens, seconds = 1000 * kept + 600, 10 * kept + 3
    assert load.throughput == pytest.approx(tokens / seconds)
    load.record_finished(1, 0, 200, now=115.0)  # 4 of 8 were in hand: the last measure
    kept = math.exp(-2 / 60)
    tokens, seconds = tokens * kept + 200, seconds * kept + 2
    assert load.throughput == pytest.approx(tokens / seconds)
    load.record_finished(3, 0, 1, now=900.0)
    assert load.throughput == pytest.approx(tokens / seconds)
    load.record_sent(1, 0, now=5000.0)  # nor does the time without work count
    load.record_finished(1, 0, 500, now=5010.0)
    kept = math.exp(-10 / 60)
    assert load.throughput == pytest.approx((tokens * kept + 500) / (seconds * kept + 10))


def test_the_mean_length_follows_what_finished():
    router = Router()
    router.record_finished(4, 400)
    assert router.response_length == pytest.approx(100)
    router.record_finished(12, 2400)
    assert router.response_length == pytest.approx((400 + 2400) / 16)
    for _ in range(2000):
        router.record_finished(8, 80)
    assert router.response_length == pytest.approx(10, abs=0.01)


def test_a_retry_goes_back_unless_that_replica_is_gone_or_overloaded():
    router, loads = Router(), [ReplicaLoad("a", 1000), ReplicaLoad("b", 1000), ReplicaLoad("c", 1000)]
    owners = {w.group.prompt: load for w, load in router.share([work(n) for n in range(24)], loads, 0.0)}
    [(_, again)] = router.share([work(1, num_samples=1)], loads, 0.0)
    assert again is owners[1]
    others = [load for load in loads if load is not owners[1]]
    [(_, elsewhere)] = router.share([work(1, num_samples=1)], others, 0.0)  # it is not routed now
    assert elsewhere is not owners[1]
    owners[2].record_sent(100, 0, 0.0)
    [(_, least)] = router.share([work(2, num_samples=1)], loads, 0.0)
    assert least is not owners[2]


def test_a_session_stays():
    router, loads = Router(), [ReplicaLoad("a", 1000), ReplicaLoad("b", 1000)]
    router.record_finished(1, LONGEST)
    for load in loads:
        load.record_sent(40, 0, 0.0)
    placed = router.share([work(n, 1, session="s") for n in range(8)], loads, 0.0)
    assert len({load.name for _, load in placed}) == 1  # 48 and 40 samples: within a factor of 1.25


def test_groups_with_the_same_header_share_replicas_until_these_are_behind():
    """20 replicas with 40 samples each: the header stays on one until its next group would end later than
    1.25 times as late as elsewhere: 40 + 8 n > 1.25 * 48, that is after two groups."""
    router, loads = Router(), [ReplicaLoad(f"r{n}", 1000) for n in range(20)]
    router.record_finished(1, LONGEST)
    for load in loads:
        load.record_sent(40, 0, 0.0)
    header = np.arange(200)
    groups = [work(n, prompt=np.append(header, [n] * 100)) for n in range(10)]
    names = [load.name for _, load in router.share(groups, loads, 0.0)]
    assert [names.count(name) for name in dict.fromkeys(names)] == [2, 2, 2, 2, 2]
    router = Router()
    groups = [work(n, prompt=np.append([n], header)) for n in range(10)]  # nothing in common
    names = [load.name for _, load in router.share(groups, loads, 0.0)]
    assert len(set(names)) == 10


def test_what_a_replica_had_is_forgotten_with_it_and_in_the_end_anyway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "MAX_REMEMBERED", 10)
    router, loads = Router(), [ReplicaLoad("a", 10**6), ReplicaLoad("b", 10**6)]
    router.share([work(n, prompt=np.arange(n, n + 2000)) for n in range(100)], loads, 0.0)
    assert len(router._had) == 10
    router.forget("a")
    router.forget("b")
    assert not any(router._had.values())
