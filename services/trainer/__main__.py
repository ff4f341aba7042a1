"""`python -m atoll.trainer`: one trainer rank. Rank 0 serves and registers; the others follow."""

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from atoll.config.errors import ConfigError
from atoll.config.load import read_resolved, trainer_rank
from atoll.config.schema import Role
from atoll.runtime.errors import MemoryExhaustedError, UserError
from atoll.runtime.gpus import take_gpu
from atoll.runtime.process import (
    EXIT_RANK_LOST,
    EXIT_RESTARTS_EXHAUSTED,
    ServiceContext,
    announce,
    parse_arguments,
    run_service,
)
from atoll.runtime.prometheus import ProcessMetrics
from atoll.runtime.telemetry import configure_logging

if __name__ == "__main__":  # before torch, which the next imports load, looks for GPUs
    try:
        rank, arguments = trainer_rank(), parse_arguments("trainer")
        if arguments.ready_fd is None:  # the launcher has chosen the GPUs of those that it starts
            take_gpu(read_resolved(arguments.config), arguments.role, rank)
    except (ConfigError, UserError) as error:
        sys.exit(f"trainer: {error}")

from atoll.trainer.command_channel import LEADER, RankLostError, SetupRefusedError, translate_rank_loss
from atoll.trainer.folders import AllowedFolders
from atoll.trainer.megatron import cpu_compat  # noqa: F401 - before anything of Megatron's
from atoll.trainer.rank import Rank
from atoll.trainer.service import TrainerService


async def build_leader(context: ServiceContext) -> TrainerService:
    """Rank 0, in the thread in which it runs commands, behind its door."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
    loop, role = asyncio.get_running_loop(), cast(Role, context.role)
    rank = await loop.run_in_executor(thread, Rank, context.config, role, context.host)
    return TrainerService(thread, rank, AllowedFolders(context.config.folder, context.exports))


def run_follower() -> None:
    """Runs the leader's commands until it stops, whatever signal says so. Raises RankLostError if a rank
    dies."""
    arguments = parse_arguments("trainer")
    configure_logging(arguments.name)
    try:
        config, metrics = read_resolved(arguments.config), ProcessMetrics()
        metrics.serve(config.prometheus)
        rank = Rank(config, arguments.role, arguments.host)
        for number in (signal.SIGTERM, signal.SIGINT):  # a signal to all ranks: the leader ends them
            signal.signal(number, signal.SIG_IGN)
        if arguments.ready_fd is not None:
            announce(arguments.ready_fd, "", metrics.address)
        rank.follow()
        rank.close()
    except (UserError, ConfigError, MemoryExhaustedError) as error:
        sys.exit(f"{arguments.name}: {error}")


if __name__ == "__main__":
    try:
        with translate_rank_loss():
            if rank == LEADER:
                run_service("trainer", build_leader)
            else:
                run_follower()
    except RankLostError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_RANK_LOST)
    except SetupRefusedError as error:
        print(f"{parse_arguments('trainer').name}: {error}", file=sys.stderr)
        sys.exit(EXIT_RESTARTS_EXHAUSTED)
