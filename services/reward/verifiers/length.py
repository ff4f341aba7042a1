"""What a response's length takes from its score, or costs."""

from services.wire.types import ScoreItem


def overlong(item: ScoreItem, *, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """0 up to max_tokens - buffer tokens, then down linearly to -penalty at max_tokens, and on beyond.

    Source: DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    excess = item.response_length - (max_tokens - buffer)
    return min(-excess / buffer * penalty, 0.0)


def length_cost(item: ScoreItem, *, per_token: float = 1.0) -> float:
    """A cost for Safe-RLHF: the number of tokens, the stop token included, times `per_token`."""
    return per_token * item.response_length
