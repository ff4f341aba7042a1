"""`python -m atoll.rollout`: one rollout replica."""

from atoll.rollout.service import RolloutService
from atoll.runtime.process import run_service

if __name__ == "__main__":
    run_service("rollout", RolloutService.build)
