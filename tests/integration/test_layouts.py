"""Every parallel layout makes the same updates as a plain padded transformers loop.

One launch per layout makes all its assertions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from atoll.config.schema import ParallelConfig
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from tests.conftest import write_model
from tests.plain_loop import ADAMW, PPO, TEMPERATURE, Reference, check_updates, reference_loop
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Layout:
    family: str
    parallel: ParallelConfig
    distributed: bool = False  # the optimizer
    num_layers: int = 2


LAYOUTS = {
    "tp2": Layout("qwen3", ParallelConfig(tensor=2)),
    "tp2_sp": Layout("qwen2", ParallelConfig(tensor=2, sequence=True)),
    "pp2": Layout("qwen2", ParallelConfig(pipeline=2)),
    "pp2_tied": Layout("qwen2_tied", ParallelConfig(pipeline=2)),
    "pp2_vpp2": Layout("qwen3", ParallelConfig(pipeline=2, virtual_pipeline=2), num_layers=4),
    "dp2_distopt": Layout("qwen2_tied", ParallelConfig(data=2), distributed=True),
    "cp2": Layout("qwen2", ParallelConfig(context=2)),
    "tp2_pp2": Layout("qwen3", ParallelConfig(tensor=2, pipeline=2)),
    "tp2_sp_pp2_vpp2": Layout(
        "qwen2_tied", ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2), num_layers=4
    ),
    "tp2_sp_dp2_distopt": Layout("qwen3", ParallelConfig(tensor=2, sequence=True, data=2), distributed=True),
    "pp2_dp2_distopt": Layout("qwen2_tied", ParallelConfig(pipeline=2, data=2), distributed=True),
    "tp2_sp_cp2": Layout("qwen3", ParallelConfig(tensor=2, sequence=True, context=2)),
    "pp2_vpp2_cp2": Layout(
        "qwen2_tied", ParallelConfig(pipeline=2, virtual_pipeline=2, context=2), num_layers=4
    ),
    "cp2_dp2_distopt": Layout("qwen2_tied", ParallelConfig(context=2, data=2), distributed=True),
    "moe": Layout("qwen3_moe", ParallelConfig()),
    "moe_tp2_sp": Layout("qwen3_moe", ParallelConfig(tensor=2, sequence=True)),
    "moe_ep2": Layout("qwen3_moe", ParallelConfig(expert=2, data=2)),
    "moe_tp2_sp_ep2": Layout("qwen3_moe", ParallelConfig(tensor=2, sequence=True, expert=2)),
    "moe_pp2_ep2_distopt": Layout(
        "qwen3_moe", ParallelConfig(pipeline=2, expert=2, data=2), distributed=True
    ),
    "tp2_pp2_dp2": Layout("qwen2_tied", ParallelConfig(tensor=2, pipeline=2, data=2)),
}


@pytest.fixture(scope="module")
def loop_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], tuple[Path, Reference]]:
    """A layout's model and its reference loop, computed once for each family and depth."""

    @cache
    def made(family: str, num_layers: int) -> tuple[Path, Reference]:
        folder = tmp_path_factory.mktemp(family)
        is_tied = family.endswith("_tied")
        write_model(
            folder,
            family.removesuffix("_tied"),
            num_hidden_layers=num_layers,
            tie_word_embeddings=is_tied,
        )
        return folder, reference_loop(folder)

    return lambda layout: made(layout.family, layout.num_layers)


def check_rank(folder: Path, reference: Reference, layout: Layout) -> None:
    initialize_parallel(layout.parallel)
    settings = ModelSettings(sequence_parallel=layout.parallel.sequence)
    forward = policy_forward(folder, temperature=TEMPERATURE, settings=settings)
    optimizer = ADAMW.model_copy(update={"distributed": layout.distributed})
    check_updates(policy_learner(forward, optimizer, PPO), reference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_equal_a_plain_loop(loop_of: Callable[[Layout], tuple[Path, Reference]], name: str) -> None:
    layout = LAYOUTS[name]
    num_ranks = layout.parallel.world_size
    assert len(run_ranks(check_rank, num_ranks, *loop_of(layout), layout)) == num_ranks
