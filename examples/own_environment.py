"""An environment of one's own, as Gymnasium has them, whose observations and actions are text: the policy
counts down to zero. See docs/agents.md."""

from typing import Any


class Countdown:
    def __init__(self) -> None:
        self._left = 0

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """`options`: the row's `environment`."""
        self._left = options.get("start", 3)
        return f"Count down from {self._left}, one number at a time.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """1 for each number in its turn; a wrong one ends the episode."""
        self._left -= 1
        is_right = action.strip() == str(self._left)
        return "Next?", float(is_right), not is_right or self._left == 0, False, {}
