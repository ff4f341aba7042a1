"""Keys and values of each session's last turn, so that the next turn computes only its new tokens.

Letters in shapes: L kept positions, S positions of a sequence.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from atoll.rollout.engines.local_model import Past
from atoll.wire.types import Int32


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    token_ids_L: Int32
    past: Past


class SessionCache:
    """One thread owns it. All of it belongs to one version of the weights."""

    def __init__(self, max_positions: int) -> None:
        """Once more than `max_positions` are kept, the sessions that waited longest lose theirs."""
        self._max_positions = max_positions
        self._num_positions = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by session, the oldest first

    def __contains__(self, session: str) -> bool:
        return session in self._kept

    def keep(self, session: str, token_ids_L: Int32, past: Past) -> None:
        """Replaces the cache of the session's previous turn."""
        self._forget(session)
        self._kept[session] = _Kept(token_ids_L, past)
        self._num_positions += len(token_ids_L)
        while self._num_positions > self._max_positions:
            self._forget(next(iter(self._kept)))

    def find(self, session: str, token_ids_S: Int32) -> tuple[Past, int]:
        """What is kept, and how many of its positions the sequence begins with: not all of it, since the last
        token has to be computed."""
        kept = self._kept[session]
        length = min(len(kept.token_ids_L), len(token_ids_S) - 1)
        differing = np.flatnonzero(kept.token_ids_L[:length] != token_ids_S[:length])
        return kept.past, int(differing[0]) if len(differing) else length

    def clear(self) -> None:
        self._kept.clear()
        self._num_positions = 0

    def _forget(self, session: str) -> None:
        if kept := self._kept.pop(session, None):
            self._num_positions -= len(kept.token_ids_L)
