"""`python -m atoll.rollout`: one rollout replica."""

import sys

from atoll.config.errors import ConfigError
from atoll.config.load import read_resolved, set_environment
from atoll.config.placement import replica_environment
from atoll.runtime.errors import UserError
from atoll.runtime.gpu_claims import claimed_environment
from atoll.runtime.process import parse_arguments, run_service
from atoll.runtime.telemetry import configure_logging

if __name__ == "__main__":  # before torch, which the next import loads, looks for GPUs
    arguments = parse_arguments("rollout")
    configure_logging(arguments.name)
    try:
        config = read_resolved(arguments.config)
        if arguments.claim_gpus:
            set_environment(claimed_environment(config, arguments.claim_gpus, arguments.name))
        elif arguments.ready_fd is None:  # the launcher has chosen the GPUs of those that it starts
            set_environment(replica_environment(config, arguments.name))
    except (ConfigError, UserError) as error:
        sys.exit(f"{arguments.name}: {error}")

from atoll.rollout.service import RolloutService

if __name__ == "__main__":
    run_service("rollout", RolloutService.build)
