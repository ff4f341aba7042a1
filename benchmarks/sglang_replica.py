"""One replica with real SGLang on a CPU, without a coordinator: prints its address and serves until its
standard input ends.

Runs in SGLang's environment: `.venv-sglang/bin/python -m benchmarks.sglang_replica FOLDER`.
"""

import asyncio
import sys
from pathlib import Path

from atoll.config.load import access_token
from atoll.config.schema import SGLangConfig
from atoll.rollout.engines.sglang.engine import SGLangEngine
from atoll.rollout.service import RolloutService
from atoll.runtime.server import Server
from atoll.wire.types import ReceiverSetup, Version


async def main(folder: Path) -> None:
    engine = await SGLangEngine.start(
        folder,
        device="cpu",
        dtype="float32",
        threads=1,
        config=SGLangConfig.model_validate({"log_level": "warning"}),
        start_timeout_s=600.0,
        version=Version("", 0),
        setup=ReceiverSetup("shm", deadline_s=60.0, staging="device"),
    )
    service = RolloutService(engine, "rollout-0", "bench")
    server = await Server.start(
        "atoll.v1.Rollout", service.add_to, host="127.0.0.1", port=0, token=access_token(), setting=""
    )
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s=1.0)
    await service.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
