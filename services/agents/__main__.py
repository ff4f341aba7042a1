"""`python -m atoll.agents`: one process that runs agent functions."""

from atoll.agents.service import AgentsService
from atoll.runtime.process import run_service

if __name__ == "__main__":
    run_service("agents", AgentsService.build)
