"""An environment of openenv-core: 1 for an answer whose first character is the ground truth's, else 0."""

from listening import serve
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    answer: str


class Sum(Environment[Answer, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._expected = ""
        self._state = State()

    def reset(self, seed=None, episode_id=None, ground_truth="", **kwargs) -> Observation:
        self._expected = ground_truth
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation()

    def step(self, action: Answer, timeout_s=None, **kwargs) -> Observation:
        self._state.step_count += 1
        return Observation(reward=float(action.answer[:1] == self._expected[:1] != ""), done=True)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    serve(create_app(Sum, Answer, Observation, max_concurrent_envs=64))
