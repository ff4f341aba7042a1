"""Conversations with answers to learn, as token sequences with loss masks.

A row is one sequence as long as its rendered text only grows. Of a question, an answer, and one more of each:

    <|im_start|>user 12+34=<|im_end|><|im_start|>assistant 46<|im_end|><|im_start|>user +1=<|im_end|>...

The text up to the second answer starts with the text up to the first one, that answer and the token that ends
it, so the second answer is learned after what the policy sees at inference. If the template rewrites what
comes before an answer, as some remove earlier thinking, a new sequence begins with the rewritten text.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np

from atoll.coordinator.data.dataset_files import row_error
from atoll.coordinator.data.dataset_rows import SupervisedRow
from atoll.runtime.rendering import Renderer, Tools, as_template_message
from atoll.wire.types import Bool, Int32, Message

_ROWS_AT_ONCE = 64  # to encode: encodings take a hundred bytes per token
_OPENING = 40  # characters of a generation prompt, which may open a thought
# private characters around a learned content, to find it in the rendered text
_BEGIN, _END = "\U0010ff00", "\U0010ff01"


class SupervisedSequence(NamedTuple):
    token_ids: Int32  # [T]
    loss_mask: Bool  # [T] True: learned; never the first token, which nothing predicts


class _View(NamedTuple):
    """What the policy is given: the first messages of a row."""

    end: int  # number of messages
    text: str
    learned: Sequence[slice]  # characters of each learned message but for answers


class _Part(NamedTuple):
    """A piece of a sequence that is encoded by itself: text that is given, or an answer."""

    text: str
    answer_end: int | None = None  # of an answer: the token that ends it
    follows: bool = False  # of given text: it begins with that token of the answer before it
    learned: Sequence[slice] = ()  # characters, of given text


def render_messages(
    messages: Sequence[Message], renderer: Renderer, tools: Tools = (), *, add_generation_prompt: bool = True
) -> str:
    """The text up to the next answer, or of the whole conversation.

    Raises ValueError if the chat template refuses the messages or does not show their tool calls.
    """
    try:
        text = renderer.render(
            list(map(as_template_message, messages)), tools, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: of JSON filters
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    hidden = [call.name for message in messages for call in message.tool_calls if call.name not in text]
    if hidden:
        raise ValueError(f"the chat template does not show the call of {hidden[0]}; use one that does")
    return text


def encode_rows(
    path: Path, rows: Sequence[SupervisedRow], renderer: Renderer
) -> Iterator[list[SupervisedSequence]]:
    """The sequences of each row. Raises UserError that names file and row."""
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        cut = [
            _cut(path, number, row, renderer)
            for number, row in enumerate(rows[first : first + _ROWS_AT_ONCE], start=first)
        ]
        encoded = _encode([part for row in cut for parts in row for part in parts], renderer)
        for number, row in enumerate(cut, start=first):
            yield [_join(path, number, list(islice(encoded, len(parts)))) for parts in row]


def _cut(path: Path, number: int, row: SupervisedRow, renderer: Renderer) -> list[list[_Part]]:
    try:
        return list(_sequences(row, renderer))
    except ValueError as error:
        raise row_error(path, number, error) from None


def _sequences(row: SupervisedRow, renderer: Renderer) -> Iterator[list[_Part]]:
    """The parts of each sequence."""
    answers = [i for i, message in enumerate(row.messages) if row.learned[i] and message.role == "assistant"]
    views = [_view(row, end, renderer) for end in answers] + [_view(row, None, renderer)]
    parts: list[_Part] = []
    so_far, end_text, num_learned = "", "", 0  # of parts
    for view, following in zip_longest(views, views[1:]):
        if following is None and len(view.learned) == num_learned:
            break  # nothing is learned after the last answer
        extends = bool(end_text) and view.text.startswith(so_far)
        if parts and not extends:
            yield parts
            parts = []
        start = len(so_far) - len(end_text) if extends else 0
        spans = [slice(span.start - start, span.stop - start) for span in view.learned[num_learned:]]
        parts.append(_Part(view.text[start:], follows=extends, learned=spans))
        if following is None:
            break
        answer, end_text = _answer(row, view, following, renderer)
        parts.append(_Part(answer, renderer.stop_texts.get(end_text, renderer.eos_id)))
        so_far, num_learned = view.text + answer + end_text, len(view.learned)
    yield parts


def _answer(row: SupervisedRow, view: _View, following: _View, renderer: Renderer) -> tuple[str, str]:
    """The message after `view`, and the text of the token that ends it, "" if the template shows none.

    Text is learned as it is; tool calls as the template writes them, within the row if it can be.
    """
    message, stops = row.messages[view.end], renderer.stop_texts
    if not message.tool_calls:
        shown = view.text + message.content
        ends = (stop for stop in stops if following.text.startswith(shown + stop))
        return message.content, next(ends, "")
    alone = render_messages(row.messages[: view.end + 1], renderer, row.tools, add_generation_prompt=False)
    for text in (following.text, alone):
        reply = text[len(view.text) :]
        places = [(place, stop) for stop in stops if (place := reply.find(stop)) >= 0]
        if text.startswith(view.text) and (places or text is alone):
            place, stop = min(places, default=(len(reply), ""))
            if _letters(message.content) not in _letters(view.text[-_OPENING:] + reply[:place]):
                raise ValueError("the chat template does not show the content beside tool_calls: remove it")
            return reply[:place], stop
    raise ValueError(
        "the chat template does not write tool_calls after its generation prompt "
        f"{view.text[-_OPENING:]!r}: put them into the content as text"
    )


def _letters(text: str) -> str:
    """Without what templates alter around thoughts."""
    return re.sub(r"</?think>|\s", "", text)


def _view(row: SupervisedRow, end: int | None, renderer: Renderer) -> _View:
    """The first `end` messages up to the answer, or all messages."""
    messages = row.messages[:end]
    others = [i for i, message in enumerate(messages) if row.learned[i] and message.role != "assistant"]

    def render(messages: Sequence[Message]) -> str:
        return render_messages(messages, renderer, row.tools, add_generation_prompt=end is not None)

    text = render(messages)
    if not others:
        return _View(len(messages), text, ())
    marked = [_marked(message) if i in others else message for i, message in enumerate(messages)]
    pieces = re.split(f"[{_BEGIN}{_END}]", render(marked))  # given, learned, given, ..., given
    bounds = np.cumsum(list(map(len, pieces)))
    if "".join(pieces) != text or len(pieces) != 2 * len(others) + 1:
        roles = ", ".join(sorted({messages[i].role for i in others}))
        raise ValueError(f"the chat template alters what is learned of {roles}: learn other roles")
    spans = [slice(int(a), int(b)) for a, b in zip(bounds[:-1:2], bounds[1::2], strict=True)]
    return _View(len(messages), text, spans)


def _marked(message: Message) -> Message:
    """White space around the content stays outside, where templates may strip it."""
    core = message.content.strip()
    before, _, after = message.content.partition(core) if core else (message.content, "", "")
    return message._replace(content=f"{before}{_BEGIN}{core}{_END}{after}")


def _encode(parts: Sequence[_Part], renderer: Renderer) -> Iterator[tuple[Int32, Bool]]:
    """Token ids [T] and loss mask [T] of each part."""
    is_first = [part.answer_end is None and not part.follows for part in parts]
    encodings = {
        flag: iter(
            renderer.encode_parts(
                [part.text for part, first in zip(parts, is_first, strict=True) if first == flag],
                are_first=flag,
            )
        )
        for flag in (True, False)
    }
    for part, flag in zip(parts, is_first, strict=True):
        encoding = next(encodings[flag])
        ids = np.array(encoding.ids, np.int32)
        if part.answer_end is not None:
            ids = np.append(ids, np.int32(part.answer_end))
            yield ids, np.ones(len(ids), bool)
            continue
        mask = np.zeros(len(ids), bool)
        if part.learned:
            starts, ends = np.array(encoding.offsets).T
            for span in part.learned:
                inside = np.flatnonzero((starts >= span.start) & (starts < span.stop) & (ends > starts))
                mask[inside.min(initial=len(ids)) : inside.max(initial=-1) + 1] = True
        yield ids[part.follows :], mask[part.follows :]


def _join(path: Path, number: int, parts: Sequence[tuple[Int32, Bool]]) -> SupervisedSequence:
    ids, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(parts[0][0]) == 0:
        raise row_error(path, number, "what comes before the answer has no token in this tokenizer")
    mask[0] = False
    if not mask.any():
        raise row_error(path, number, "no token to learn")
    return SupervisedSequence(ids, mask)
