"""Validates requests before they reach an engine: an id outside the vocabulary crashes some engines, and with
them every other request.
"""

from collections.abc import Set

import numpy as np

from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.types import EngineMemory, Int32, TurnRequest

MIN_TEMPERATURE = 1e-6  # minimum except 0: logits divided by it must stay finite


def check_awake(released: Set[EngineMemory]) -> None:
    """Raises ServiceUnavailableError if the engine has given memory back."""
    if released:
        names = " and ".join(sorted(memory.name for memory in released))
        raise ServiceUnavailableError(
            f"this replica has released its memory ({names}) to the models: restore it first"
        )


def check_request(request: TurnRequest, vocab_size: int, max_length: int, setting: str) -> None:
    """Raises UserError. `max_length` is of prompt and response together, as the setting says."""
    ids, sampling, what = request.context_ids, request.sampling, f"the context of {request.ids[0]}"
    if not 0 < len(ids) < max_length:
        raise UserError(
            f"{what} has {len(ids)} tokens, expected 1 to {max_length - 1}: "
            f"shorten it, set data.max_prompt_tokens, or raise {setting}"
        )
    _check_ids(what, ids, vocab_size)
    valid = (
        sampling.max_new_tokens >= 1
        and (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < np.inf)
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and all(sampling.stop)
    )
    if not valid:
        raise UserError(
            f"{request.ids[0]}: {sampling}; expected max_new_tokens >= 1, temperature 0 or at "
            f"least {MIN_TEMPERATURE:g}, 0 < top_p <= 1, top_k >= 0 and stop strings that are not empty"
        )


def check_sequence(ids: Int32, vocab_size: int, max_length: int, setting: str) -> None:
    """Raises UserError for a sequence that cannot be scored."""
    if not 0 < len(ids) <= max_length:
        raise UserError(
            f"a sequence to score has {len(ids)} tokens, expected 1 to {max_length}: "
            f"shorten it, or raise {setting}"
        )
    _check_ids("a sequence to score", ids, vocab_size)


def _check_ids(what: str, ids: Int32, vocab_size: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        raise UserError(
            f"{what} has token id {bad[0]}, expected 0 to {vocab_size - 1}: the tokenizer does not match "
            "this model"
        )
