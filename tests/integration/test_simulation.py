"""Random lives of runs: killed, stopped and resumed at any moment, with lost stores and faulty services.

Everything follows from the seed, so the name of a test that failed repeats it:
pytest 'tests/integration/test_simulation.py::test_nothing_is_lost_and_nothing_trained_on_twice[17]'
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.runtime.store import EmbeddedServer, run_embedded_server
from tests.simulation.judge import faults
from tests.simulation.mutations import MUTATIONS, Mutation
from tests.simulation.runs import scene, simulate

NUM_FAST = 20  # seeds in the fast tests
NUM_SEEDS = 300
MAX_SEEDS = 100  # in which a mutation is to be noticed; most are in the first five


@pytest.fixture(scope="module")
def simulated_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Of its own: simulated losses empty it."""
    with run_embedded_server(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.mark.parametrize(
    "seed", [*range(NUM_FAST), *(pytest.param(n, marks=pytest.mark.long) for n in range(NUM_FAST, NUM_SEEDS))]
)
def test_nothing_is_lost_and_nothing_trained_on_twice(
    seed: int, tmp_path: Path, simulated_store: EmbeddedServer
) -> None:
    chosen = scene(seed, tmp_path)
    outcome = simulate(chosen, simulated_store.url)
    assert not faults(chosen, outcome), outcome.lives


def test_a_seed_gives_the_same_run_each_time(tmp_path: Path, simulated_store: EmbeddedServer) -> None:
    outcomes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        outcomes.append(simulate(scene(1, tmp_path / name), simulated_store.url))
    first, second = outcomes
    assert (first.lives, first.ticks, first.history) == (second.lives, second.ticks, second.history)
    assert len(first.lives) > 1


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_fault_is_noticed(mutation: Mutation, tmp_path: Path, simulated_store: EmbeddedServer) -> None:
    for seed in range(MAX_SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chosen = scene(seed, folder)
        try:
            with mutation():
                outcome = simulate(chosen, simulated_store.url)
        except Exception:  # the run itself has noticed it
            return
        if faults(chosen, outcome):
            return
    pytest.fail(f"no run of {MAX_SEEDS} seeds shows it")
