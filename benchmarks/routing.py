"""The coordinator's part of placing groups: a queue of them over many replicas, none of which is full."""

import time
from typing import Any

import numpy as np

from atoll.coordinator.fleet.routing import ContextWork, ReplicaLoad, Router
from atoll.wire.types import GroupId


def run(num_groups: int = 10_000, num_replicas: int = 64, prompt_tokens: int = 1200) -> dict[str, Any]:
    """Microseconds per group of 8 samples, half of whose prompt is a header that all of them share."""
    rng = np.random.default_rng(0)
    header = rng.integers(0, 50_000, prompt_tokens // 2, np.int32)
    prompts = [
        np.append(header, rng.integers(0, 50_000, prompt_tokens // 2, np.int32)) for _ in range(num_groups)
    ]
    router = Router()
    loads = [ReplicaLoad(str(number), 8 * num_groups) for number in range(num_replicas)]
    for load in loads:  # measured ones, of different throughput
        load.record_sent(1, 0, 0.0)
        load.record_finished(1, 0, int(rng.integers(1000, 8000)), 1.0)
    router.record_finished(1, 500)
    waiting = [
        ContextWork(GroupId("toy", 0, number), prompt, 8, 1000) for number, prompt in enumerate(prompts)
    ]
    begun = time.process_time()
    placed = router.share(waiting, loads, 0.0)
    seconds = time.process_time() - begun
    assert len(placed) == num_groups
    return {"groups": num_groups, "replicas": num_replicas, "us_per_group": seconds / num_groups * 1e6}
