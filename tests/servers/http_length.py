"""A reward model behind FastAPI in the shape of OpenRLHF's: the response's share of ten characters, with its
number of digits in extra_logs. After POST /break it answers nonsense."""

from fastapi import FastAPI
from listening import serve
from pydantic import BaseModel

application = FastAPI()
is_broken = False


class Batch(BaseModel):
    query: list[str]
    prompts: list[str]
    labels: list[str]


@application.post("/get_reward")
def get_reward(batch: Batch) -> dict[str, object]:
    if is_broken:
        return {"rewards": "lots"}
    responses = [query.removeprefix(prompt) for query, prompt in zip(batch.query, batch.prompts, strict=True)]
    rewards = [len(response) / 10 for response in responses]
    digits = [float(sum(map(str.isdecimal, response))) for response in responses]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"digits": digits}}


@application.post("/break")
def break_down() -> None:
    global is_broken
    is_broken = True


if __name__ == "__main__":
    serve(application)
