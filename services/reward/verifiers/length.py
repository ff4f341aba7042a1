"""What a response's length takes from its score, or costs."""

from atoll.wire.types import ScoreItem


def overlong(item: ScoreItem, *, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """0 up to max_tokens - buffer tokens, then down linearly to -penalty at max_tokens, and on beyond.

    Source: DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    excess = item.response_length - (max_tokens - buffer)
    return min(-excess / buffer * penalty, 0.0)


def length_target(item: ScoreItem, *, tokens: int | None = None, alpha: float = 0.0003) -> float:
    """-alpha for each token that the response is longer or shorter than the target: `tokens`, or of each row
    its `extra_info.num_tokens`.

    Source: L1-Exact (Aggarwal and Welleck 2025, https://arxiv.org/abs/2503.04697), eq. 1; its other part, 1
    where the answer is right, is a grader beside this one.
    """
    if tokens is None:
        if "num_tokens" not in item.extra:
            raise ValueError("the row has no extra_info.num_tokens; give length_target its parameter tokens")
        tokens = int(item.extra["num_tokens"])
    if tokens < 1:  # L1's rows say "at most n" as -n: another rule
        raise ValueError(f"length_target: got a target of {tokens} tokens, expected 1 or more")
    return -alpha * abs(item.response_length - tokens)


def length_cost(item: ScoreItem, *, per_token: float = 1.0) -> float:
    """A cost for Safe-RLHF: the number of tokens, the stop token included, times `per_token`."""
    return per_token * item.response_length
