"""Rewards and costs that depend on a response's length."""

from typing import Annotated

from annotated_types import Ge, Gt

from atoll.wire.types import ScoreItem


def overlong(
    item: ScoreItem,
    *,
    max_tokens: Annotated[int, Ge("buffer")],
    buffer: Annotated[int, Gt(0)],
    penalty: Annotated[float, Ge(0)] = 1.0,
) -> float:
    """0 up to max_tokens - buffer tokens, then linearly down to -penalty at max_tokens, and beyond.

    Source: DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13.
    """
    excess = item.response_length - (max_tokens - buffer)
    return -min(max(excess / buffer, 0.0), 1.0) * penalty


def length_target(
    item: ScoreItem, *, tokens: Annotated[int, Gt(0)] | None = None, alpha: Annotated[float, Ge(0)] = 0.0003
) -> float:
    """-alpha for each token by which the response is longer or shorter than the target: `tokens`, or each
    row's `extra_info.num_tokens`.

    Source: L1-Exact (Aggarwal and Welleck 2025, https://arxiv.org/abs/2503.04697), eq. 1; its other term, 1
    if the answer is right, is a separate grader.
    """
    if tokens is None:
        if "num_tokens" not in item.extra:
            raise ValueError(
                "the row has no extra_info.num_tokens: add it, or set the parameter tokens of length_target"
            )
        tokens = int(item.extra["num_tokens"])
    if tokens < 1:  # in L1's rows, -n means "at most n": another rule
        raise ValueError(f"length_target: got a target of {tokens} tokens, expected 1 or more")
    return -alpha * abs(item.response_length - tokens)


def length_cost(item: ScoreItem, *, per_token: Annotated[float, Ge(0)] = 1.0) -> float:
    """A cost for Safe-RLHF: the number of tokens, the stop token included, times `per_token`."""
    return per_token * item.response_length
