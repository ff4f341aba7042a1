"""`python -m atoll.rollout`: one rollout replica."""

from atoll.config.load import read_resolved, set_environment
from atoll.config.placement import replica_environment
from atoll.rollout.service import RolloutService
from atoll.runtime.process import parse_arguments, run_service

if __name__ == "__main__":
    arguments = parse_arguments("rollout")
    if arguments.ready_fd is None:  # the launcher has chosen the GPUs of those that it starts
        set_environment(replica_environment(read_resolved(arguments.config), arguments.name))
    run_service("rollout", RolloutService.build)
