"""What benchmarks/agent_load.py compares with: an asyncio loop that asks the mock engine itself, and keeps no
tokens: `python -m benchmarks.agent_load_plain ADDRESS SESSIONS TURNS`
"""

import asyncio
import sys

import numpy as np

from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import RolloutClient
from atoll.wire.types import GroupId, SampleId, Sampling, TurnId, TurnRequest
from benchmarks.agent_load_environment import STEP_S

CONTEXT = np.ones(256, np.int32)


async def play(client: RolloutClient, number: int, num_turns: int) -> None:
    sample = SampleId(GroupId("plain", 0, number), 0)
    for turn in range(num_turns):
        id = TurnId(sample, 0, turn)
        request = TurnRequest((id,), CONTEXT, Sampling(max_new_tokens=256), session=str(sample))
        async for _ in client.generate("actor", [request]):
            pass
        await asyncio.sleep(STEP_S)


async def main(address: str, num_sessions: int, num_turns: int) -> None:
    client = RolloutClient(address, Caller())
    await asyncio.gather(*(play(client, number, num_turns) for number in range(num_sessions)))
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
