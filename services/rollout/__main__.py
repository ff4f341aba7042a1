"""`python -m services.rollout`: one rollout replica."""

from services.rollout.service import RolloutService
from services.runtime.process import run_service

if __name__ == "__main__":
    run_service("rollout", RolloutService.build)
