"""`python -m atoll.reward`: one reward service."""

from atoll.reward.service import RewardService
from atoll.runtime.process import run_service

if __name__ == "__main__":
    run_service("reward", RewardService.build)
