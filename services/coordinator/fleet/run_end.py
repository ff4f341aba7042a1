"""The end of a run, as it is marked in the store: a coordinator that starts again does not train again."""

from dataclasses import dataclass
from typing import Final

from atoll.config.schema import RunConfig, RunSection
from atoll.runtime.store import Script, Store

_ENDED: Final = "ended"  # hash: step, num_steps and target_reward of a RunEnd

_MARK: Final = Script(
    "redis.call('HSET', KEYS[1], 'step', ARGV[1], 'num_steps', ARGV[2], 'target_reward', ARGV[3])"
)
_CLEAR: Final = Script("redis.call('DEL', KEYS[1])")


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Where a run has ended, and the goal that it had reached by then."""

    step: int
    num_steps: int  # run.steps
    target_reward: float | None  # run.target_reward

    def is_end_of(self, run: RunSection) -> bool:
        """Whether there is nothing more to do for a run with these settings."""
        return (run.steps, run.target_reward) == (self.num_steps, self.target_reward)


async def read_end(store: Store) -> RunEnd | None:
    """None: the run has not ended."""
    cells = await store.read("HGETALL", _ENDED)
    if not cells:
        return None
    fields = {name.decode(): value.decode() for name, value in zip(cells[::2], cells[1::2], strict=True)}
    target = fields["target_reward"]
    return RunEnd(int(fields["step"]), int(fields["num_steps"]), float(target) if target else None)


async def mark_end(store: Store, end: RunEnd) -> None:
    target = "" if end.target_reward is None else repr(end.target_reward)
    await store.write(_MARK, [_ENDED], end.step, end.num_steps, target)


async def clear_end(store: Store) -> None:
    await store.write(_CLEAR, [_ENDED])


def expected_services(config: RunConfig) -> dict[str, int]:
    """How many processes the run expects to register, by role."""
    trains, generates = config.run.mode != "rollout_only", config.run.mode in ("train", "rollout_only")
    expected = dict[str, int](dict.fromkeys(config.started_roles, 1)) if trains else {}
    if generates:
        expected["rollout"] = config.rollout.replicas
    if generates and config.has_reward_service:
        expected["reward"] = 1
    if config.has_agents:
        expected["gateway"] = config.gateway.instances
        expected["agents"] = sum(agent.processes for agent in config.agents)
    return expected
