"""An agent behind FastAPI: two turns by OpenAI's client, and a reward for the last reply. It fails once after
the replies "hang" and "die". Arguments: port (0: any), folder of its faults."""

import sys
from pathlib import Path
from typing import Any

import openai
from fastapi import FastAPI, Header, HTTPException
from faults import misbehave
from listening import serve
from pydantic import BaseModel

application = FastAPI()


class Task(BaseModel):
    messages: list[dict[str, Any]]
    ground_truth: str
    model: str
    base_url: str
    api_key: str


@application.post("/solve")
async def solve(task: Task, authorization: str = Header("")) -> dict[str, Any]:
    if authorization != "Bearer sesame-4711":
        raise HTTPException(401)
    messages: list[Any] = [*task.messages]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for question in ("Are you sure?", ""):
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
            if text in ("hang", "die"):
                await misbehave(Path(sys.argv[2]), text)
    return {"reward": float(text == task.ground_truth), "environment": {"last": text}}


if __name__ == "__main__":
    serve(application, int(sys.argv[1]))
