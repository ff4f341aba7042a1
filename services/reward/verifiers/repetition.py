"""Penalizes repetition in a response."""

from typing import Annotated

import regex
from annotated_types import Ge, Gt

from atoll.reward.verifiers.language import UNSPACED
from atoll.wire.types import ScoreItem

_UNSPACED = regex.compile(f"[{UNSPACED}]")


def repetition(
    item: ScoreItem, *, ngram: Annotated[int, Gt(0)] = 3, penalty: Annotated[float, Ge(0)] = 1.0
) -> float:
    """-penalty * (1 - distinct n-grams / all n-grams) of the response's words in lower case; 0 if it has
    fewer than n words.

    Source: Yeo et al. 2025, https://arxiv.org/abs/2502.03373, appendix C.2, per response as in Open-R1.
    """
    words = _UNSPACED.sub(r" \g<0> ", item.response.lower()).split()  # each of these is a word
    total = len(words) - ngram + 1
    if total <= 0:
        return 0.0
    distinct = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
    return -penalty * (1 - distinct / total)
