"""What grading costs: programs in the sandbox, verdicts on mathematics, and the service that holds both."""

from typing import Any

from benchmarks import reward_maths, reward_sandbox, reward_service


def run() -> dict[str, Any]:
    return {"sandbox": reward_sandbox.run(), "maths": reward_maths.run(), "service": reward_service.run()}
