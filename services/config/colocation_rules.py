"""Rules about placement.mode = "colocated". See rules.py.

Partial rollouts and weights.delta need what is excluded here: staleness, and a transport that broadcasts.
"""

from collections.abc import Callable

from atoll.config.schema import RunConfig

COLOCATED = 'placement.mode = "colocated"'


def _nothing_runs_in_the_models_turn(config: RunConfig) -> str | None:
    staleness = config.coordinator.max_staleness
    if config.takes_turns and staleness > 0:
        return (
            f"{COLOCATED} stops generation while models train, but coordinator.max_staleness = {staleness} "
            'generates ahead: set it to 0, or placement.mode = "split"'
        )
    return None


def _a_version_outlives_its_push(config: RunConfig) -> str | None:
    transport = config.weights.transport
    if config.takes_turns and transport != "auto" and not config.weights.stays_readable:
        return (
            f"{COLOCATED} needs a transport whose memory replicas read when it is their turn, but "
            f'weights.transport = "{transport}" broadcasts: set it to "cuda_ipc" or "shm"'
        )
    return None


def _all_weights_are_pushed(config: RunConfig) -> str | None:
    lora = config.trainer.lora
    if config.takes_turns and lora is not None and lora.push == "adapter":
        return (
            f"{COLOCATED} releases a replica's weights in each step, but trainer.lora.push = "
            '"adapter" pushes only adapters: set it to "merged"'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _nothing_runs_in_the_models_turn,
    _a_version_outlives_its_push,
    _all_weights_are_pushed,
)
