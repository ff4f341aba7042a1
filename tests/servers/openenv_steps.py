"""An environment of openenv-core: 0.25 for each answer, 0.5 for the third, which ends the episode. It fails
once at the answers "hang" and "die". Arguments: port (0: any), folder of its faults."""

import asyncio
import sys
from pathlib import Path

from faults import misbehave
from listening import serve
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    answer: str


class Said(Observation):
    text: str = ""


class Steps(Environment[Answer, Said, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, start="", **kwargs) -> Said:
        self._state = State(episode_id=episode_id, step_count=0)
        return Said(text=f"begin at {start}")

    def step(self, action: Answer, timeout_s=None, **kwargs) -> Said:
        if action.answer in ("hang", "die"):
            asyncio.run(misbehave(Path(sys.argv[2]), action.answer))
        self._state.step_count += 1
        done = self._state.step_count == 3
        return Said(text=f"step {self._state.step_count}", reward=0.5 if done else 0.25, done=done)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    serve(create_app(Steps, Answer, Said, max_concurrent_envs=64), int(sys.argv[1]))
