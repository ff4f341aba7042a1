"""The response is the ground truth, surrounding white space apart."""

from services.wire.types import ScoreItem


def exact_match(item: ScoreItem) -> float:
    return float(item.response.strip() == item.ground_truth.strip())
