"""A reward server over HTTP: 1 for a response whose last number is the right one. See README.md."""

import os
import re
import secrets
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

TOKEN = os.environ.get("REWARD_TOKEN", "")  # none: open to anyone who reaches the port

app = FastAPI()


class Item(BaseModel):  # id, prompt, data_source, finish_reason, response_length and extra are sent too
    response: str
    ground_truth: str


class Items(BaseModel):
    items: list[Item]


@app.post("/reward")
def reward(request: Items, authorization: Annotated[str, Header()] = "") -> dict[str, object]:
    """One verdict per item, in their order."""
    if TOKEN and not secrets.compare_digest(authorization.encode(), f"Bearer {TOKEN}".encode()):
        raise HTTPException(401, "expected the bearer token of REWARD_TOKEN")
    return {"verdicts": [grade(item) for item in request.items]}


def grade(item: Item) -> dict[str, object]:
    """Either a reward, or why there is none: such an item is dropped and counted, a 0 is trained on."""
    try:
        expected = float(item.ground_truth)
    except ValueError:
        return {"error": f"ground truth {item.ground_truth!r} is not a number"}
    numbers = re.findall(r"-?\d+(?:\.\d+)?", item.response)
    if not numbers:
        return {"value": 0.0, "reason": "no number"}
    return {"value": float(float(numbers[-1]) == expected)}
