"""`python -m services.reward`: one reward service."""

from services.reward.service import RewardService
from services.runtime.process import run_service

if __name__ == "__main__":
    run_service("reward", RewardService.build)
