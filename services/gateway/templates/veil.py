"""Hides the spelling of special tokens from templates and tokenizers. Pure."""

from collections.abc import Iterable
from typing import TypeVar

Tree = TypeVar("Tree")

_ESCAPE = "\U0010f000"
_FIRST_CODE = 0x10F001
SENTINEL = "\U0010fffc"  # marks where a message's text begins
REPLY_SENTINEL = "\U0010fffd"  # marks the reply before it


class Veil:
    """Replaces the first and last characters of special tokens (`<`, `>` and the like) by private ones, so
    that no such token can begin or end in a veiled text, not even together with what a template writes
    around it. Whatever private characters a text has itself are escaped: lifting gives back any text.
    """

    def __init__(self, special_texts: Iterable[str]) -> None:
        characters = {text[index] for text in special_texts for index in (0, -1)}
        edges = sorted(edge for edge in characters if not (edge.isalnum() or edge.isspace()))
        stand_ins = [chr(_FIRST_CODE + 2 * number) for number in range(len(edges))]
        private = [_ESCAPE, SENTINEL, REPLY_SENTINEL, *stand_ins]
        escapes = [chr(_FIRST_CODE + 2 * number + 1) for number in range(len(private))]
        self._pairs = [
            *((character, _ESCAPE + code) for character, code in zip(private, escapes, strict=True)),
            *zip(edges, stand_ins, strict=True),
        ]

    def cover(self, text: str) -> str:
        for plain, veiled in self._pairs:
            text = text.replace(plain, veiled)
        return text

    def lift(self, text: str) -> str:
        """What `cover` made it of. Text that a template wrote is the same before and after."""
        if text.isascii():
            return text
        for plain, veiled in reversed(self._pairs):
            text = text.replace(veiled, plain)
        return text

    def cover_all(self, tree: Tree) -> Tree:
        """Every string of a JSON-like tree, keys included, is covered."""
        return self._cover_all(tree)  # type: ignore[return-value]

    def _cover_all(self, tree: object) -> object:
        if isinstance(tree, str):
            return self.cover(tree)
        if isinstance(tree, dict):
            return {self._cover_all(key): self._cover_all(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._cover_all(item) for item in tree]
        return tree
