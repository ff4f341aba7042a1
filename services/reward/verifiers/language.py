"""Checks that a response keeps to one language."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal

import regex
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from atoll.wire.types import Grade, ScoreItem

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}"  # scripts without spaces between words
MIN_WORDS = 4  # needed to identify a language

# the languages written in each script; if several share one, a model identifies the language
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    r"\p{Arabic}": ("ar", "fa", "ur"),
    r"\p{Bengali}": ("bn",),
    r"\p{Cyrillic}": ("bg", "ru", "uk"),
    r"\p{Devanagari}": ("hi", "mr"),
    r"\p{Greek}": ("el",),
    r"\p{Han}": ("zh",),
    r"\p{Han}\p{Hiragana}\p{Katakana}": ("ja",),
    r"\p{Hangul}": ("ko",),
    r"\p{Hebrew}": ("he",),
    r"\p{Latin}": (
        "cs", "da", "de", "en", "es", "fi", "fr", "hu", "id", "it", "nl", "no", "pl", "pt", "ro", "sv", "tr",
        "vi",
    ),
    r"\p{Tamil}": ("ta",),
    r"\p{Telugu}": ("te",),
    r"\p{Thai}": ("th",),
}  # fmt: skip

_MARKUP = regex.compile(r"\\[A-Za-z]+|</?\w+>")  # LaTeX commands, tags
# a single letter is a variable
_WORDS = regex.compile(rf"(?V1)[{UNSPACED}]|[\p{{L}}--[{UNSPACED}]][[\p{{L}}\p{{M}}'’]--[{UNSPACED}]]+")


def language_consistency(
    item: ScoreItem,
    *,
    language: Literal[
        "ar", "bg", "bn", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi", "hu", "id", "it",
        "ja", "ko", "mr", "nl", "no", "pl", "pt", "ro", "ru", "sv", "ta", "te", "th", "tr", "uk", "ur", "vi",
        "zh",
    ],
) -> float | Grade:  # fmt: skip
    """The fraction of the response's words that are in the language (ISO 639-1), from 0 to 1.

    A word must be in the language's script, an exact test. If several languages share the script, the words
    of a line must also be identified as that language (py3langid: a fixed, deterministic model of byte
    n-grams); lines of fewer than MIN_WORDS words are joined. In scripts without spaces each character is a
    word; LaTeX commands, tags and single letters are not words.
    Source: DeepSeek-R1's language consistency reward (2025, https://arxiv.org/abs/2501.12948), the fraction
    of words in the target language in the chain of thought.
    """
    script, sharing = next(entry for entry in SCRIPTS.items() if language in entry[1])
    of_script = regex.compile(f"[{script}]")
    total = right = 0
    for words in _pieces(item.response):
        total += len(words)
        matching = [word for word in words if of_script.match(word)]
        if len(sharing) > 1 and len(matching) >= MIN_WORDS:
            identified, _ = _identifier().classify(" ".join(matching))
            matching = matching if identified == language else []
        right += len(matching)
    return right / total if total else Grade(0.0, "no words")


def _pieces(text: str) -> Iterator[list[str]]:
    """The words of each line, or of several lines that are too short to identify a language."""
    words: list[str] = []
    for line in _MARKUP.sub(" ", text).splitlines():
        words += _WORDS.findall(line)
        if len(words) >= MIN_WORDS:
            yield words
            words = []
    yield words


@cache
def _identifier() -> LanguageIdentifier:
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(language for languages in SCRIPTS.values() for language in languages)
    return identifier
