"""Encodes rendered conversations; only the template's special tokens count as such."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from tokenizers import AddedToken, Tokenizer

from atoll.gateway.conversation import RequestError
from atoll.gateway.templates.veil import Veil
from atoll.wire.types import Int32

_LONG = 8192  # characters: whatever is longer is encoded off the event loop
_BLOCK = 1 << 16  # characters
_SHORT = 64  # characters: what the template repeats; its ids are kept


class Encoder:
    """Token ids of text in which contents are veiled. A special token in a content, whatever its spelling,
    is encoded as ordinary text; harmless contents get the ids that the ordinary tokenizer gives them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], max_length: int) -> None:
        """Takes over `tokenizer`: from now on it recognizes no special token. `max_length`: tokens of any
        context."""
        self._max_length = max_length
        added = dict(tokenizer.get_added_tokens_decoder())
        for id in stop_ids:
            added.setdefault(id, AddedToken(tokenizer.id_to_token(id) or f"<no token {id}>"))
        self.specials = {token.content: id for id, token in added.items() if _can_forge(token)}
        self._strip_after = {added[id].content for id in self.specials.values() if added[id].rstrip}
        self._strip_before = {added[id].content for id in self.specials.values() if added[id].lstrip}
        self.veil = Veil(self.specials)
        tokenizer.add_special_tokens([_as_special(added[id]) for id in self.specials.values()])
        tokenizer.encode_special_tokens = True  # meaning: as ordinary text
        self._tokenizer = tokenizer
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._short_ids = lru_cache(4096)(self._ids)
        self._threads = ThreadPoolExecutor(2, "encode")

    async def encode(self, text: str) -> Int32:
        """Token ids [T]. Long text is encoded in a thread, off the event loop. Raises RequestError
        (overflow) if the text is far too long."""
        if len(text) <= _LONG:
            return self.encode_now(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode_long, text)

    def encode_now(self, text: str) -> Int32:
        """Token ids [T]."""
        parts = self._special.split(text)  # text, token, text, token, ..., text
        ids: list[int] = []
        for place in range(0, len(parts), 2):
            piece = parts[place]
            if place and parts[place - 1] in self._strip_after:
                piece = piece.lstrip()
            if place + 1 < len(parts) and parts[place + 1] in self._strip_before:
                piece = piece.rstrip()
            if piece:
                ids.extend(self._short_ids(piece) if len(piece) <= _SHORT else self._ids(piece))
            if place + 1 < len(parts):
                ids.append(self.specials[parts[place + 1]])
        return np.array(ids, np.int32)

    def _encode_long(self, text: str) -> Int32:
        """The tokenizer needs some 200 bytes per token, so text that may have too many is first counted in
        blocks; their sum is close to the real count."""
        if len(text) > 4 * self._max_length:
            num_tokens = 0
            for start in range(0, len(text), _BLOCK):
                num_tokens += len(self.encode_now(text[start : start + _BLOCK]))
                if num_tokens > 2 * self._max_length:
                    raise RequestError.of_overflow(num_tokens, self._max_length)
        return self.encode_now(text)

    def encode_whole(self, text: str) -> list[int]:
        """What the ordinary tokenizer makes of text without veils. For the proof at start-up, while nothing
        else is encoded."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def opening(self) -> Int32:
        """Ids [T] that the tokenizer puts before plain text, such as a BOS token."""
        with_, without = (self._tokenizer.encode("x", add_special_tokens=flag).ids for flag in (True, False))
        return np.array(with_[: with_.index(without[0])] if without else with_, np.int32)

    def last_special(self, text: str) -> int:
        """Where the last special token of `text` begins; 0 if it has none."""
        return max((match.start() for match in self._special.finditer(text)), default=0)

    def _ids(self, piece: str) -> list[int]:
        # a batch, unlike a single text, is encoded without the interpreter's lock
        (encoding,) = self._tokenizer.encode_batch_fast([self.veil.lift(piece)], add_special_tokens=False)
        return encoding.ids


def _can_forge(token: AddedToken) -> bool:
    """False for added words and runs of whitespace, which are ordinary text."""
    text = token.content.strip("\n\t \u2581")
    return token.special or (bool(text) and not (text[0] + text[-1]).isalnum())


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        special=True,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
