"""The table of expected seconds in docs/weights.md equals what `atoll plan --weights` computes.

`python -m tests.unit.test_weights_page` prints the rows as they should be.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.plan_weights import CASES, LINKS, PushCase, estimate_push, format_row
from atoll.config.schema import TrainerSection
from atoll.runtime.memory import rank_memory

PAGE = Path("docs/weights.md")
GIB = 1 << 30
DEVICE_GIB = 80
QUICK = [case for case in CASES if case.spec.experts is None]
SLOW = [case for case in CASES if case.spec.experts is not None]  # tens of thousands of tensors


def rows(cases: list[PushCase]) -> Iterator[str]:
    for case in cases:
        yield f"| {' | '.join(format_row(estimate_push(case)))} |"


def check(cases: list[PushCase]) -> None:
    page = PAGE.read_text()
    assert f"| {' | '.join(LINKS)} |" in page
    for line in rows(cases):
        assert line in page


def test_the_page_has_what_is_computed() -> None:
    check(QUICK)


@pytest.mark.long
def test_the_page_has_what_is_computed_of_mixtures() -> None:
    check(SLOW)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.trainer.world_size}")
def test_every_trainer_fits_its_devices(case: PushCase) -> None:
    section = TrainerSection.model_validate(
        {
            "parallel": case.trainer.model_dump(),
            "dtype": "bfloat16",
            "recompute": "full",
            "max_tokens_per_microbatch": 4096,
            "attention": "flash",
            "optimizer": {"distributed": case.trainer.data > 1},
        }
    )
    stages = range(case.trainer.pipeline)
    most = max(rank_memory(case.spec, section, stage, "update").total for stage in stages)
    assert most < 0.95 * DEVICE_GIB * GIB


if __name__ == "__main__":
    print("\n".join(rows(list(CASES))))
