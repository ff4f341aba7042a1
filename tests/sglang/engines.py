"""The real SGLang on this CPU, under the contract of tests/contract."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.config.schema import SGLangConfig
from atoll.rollout.engines.base import Engine
from atoll.rollout.engines.sglang.engine import SGLangEngine
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import ReceiverSetup, Version

V0 = Version("a3f0", 0)


def started_with(tp_size: int) -> Callable[[Path], Awaitable[Engine]]:
    """Starts an engine of so many ranks."""

    async def start(folder: Path) -> Engine:
        settings = {"tp_size": tp_size, "log_level": "error"}
        return await SGLangEngine.start(
            folder,
            device="cpu",
            dtype="float32",
            threads=1,
            config=SGLangConfig.model_validate(settings),
            start_timeout_s=600.0,
            version=V0,
            setup=ReceiverSetup("shm", deadline_s=30.0, staging="device"),
            records_routes=read_spec(folder).experts is not None,
        )

    return start
