"""Learning rates: by hand, and beside transformers' schedules, which count steps from 0."""

from collections.abc import Callable

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_wsd_schedule

from atoll.config.schema import OptimizerConfig
from atoll.coordinator.algorithm.schedule import learning_rate


def rates(num_steps: int, **settings: object) -> list[float]:
    optimizer = OptimizerConfig.model_validate({"learning_rate": 2.0, **settings})
    return [learning_rate(optimizer, step, num_steps) for step in range(1, num_steps + 1)]


def test_constant_rates_follow_a_linear_warm_up() -> None:
    assert rates(4) == [2, 2, 2, 2]
    assert rates(4, warmup_steps=4) == [0.5, 1, 1.5, 2]


def test_cosine_falls_over_all_steps_after_the_warm_up() -> None:
    # 4 steps of decay: (1 + cos 0) / 2 = 1, (1 + cos 45 deg) / 2 = 0.853553, 0.5, 0.146447
    curve = [1, 0.853553, 0.5, 0.146447]
    assert rates(5, schedule="cosine", warmup_steps=1) == pytest.approx(
        [2, *(2 * c for c in curve)], abs=1e-5
    )
    # a tenth stays: 0.1 + 0.9 * curve
    lifted = rates(4, schedule="cosine", min_learning_rate_share=0.1)
    assert lifted == pytest.approx([2 * (0.1 + 0.9 * c) for c in curve], abs=1e-5)


def test_wsd_is_constant_and_falls_linearly_in_the_last_steps() -> None:
    # share 0.2 + 0.8 * (1, 3/4, 1/2, 1/4) = 1, 0.8, 0.6, 0.4
    got = rates(8, schedule="wsd", warmup_steps=2, decay_steps=4, min_learning_rate_share=0.2)
    assert got == pytest.approx([1, 2, 2, 2, 2, 1.6, 1.2, 0.8])


def of_transformers(
    scheduler: Callable[..., torch.optim.lr_scheduler.LambdaLR], **settings: object
) -> list[float]:
    """Its rates of 30 steps, the first at index 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = scheduler(optimizer, num_warmup_steps=7, **settings)
    found = []
    for _ in range(30):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_after_the_warm_up_rates_are_those_of_transformers() -> None:
    """During it, transformers is one step behind: its first step has the rate 0."""
    cosine = rates(30, schedule="cosine", warmup_steps=7)
    theirs = of_transformers(get_cosine_schedule_with_warmup, num_training_steps=30)
    assert cosine[7:] == pytest.approx(theirs[7:])
    assert cosine[:7] == pytest.approx(theirs[1:8])
    wsd = rates(30, schedule="wsd", warmup_steps=7, decay_steps=10, min_learning_rate_share=0.1)
    theirs = of_transformers(
        get_wsd_schedule, num_decay_steps=10, num_training_steps=30, decay_type="linear", min_lr_ratio=0.1
    )
    assert wsd[7:] == pytest.approx(theirs[7:])
