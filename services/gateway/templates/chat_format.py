"""The chat format of a model folder: conversations to token ids, sampled ids to messages.

A conversation is rendered whole once, by `root`. After that each turn only adds: what follows a sampled
reply is rendered behind a stand-in for the conversation before it, and cut off there. So a suffix costs what
is new, and sampled tokens never meet the tokenizer.
"""

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import jinja2
import numpy as np
import orjson

from atoll.config.schema import GatewaySection
from atoll.gateway.conversation import Demands, RequestError, Tool
from atoll.gateway.templates.demands import with_demands
from atoll.gateway.templates.encoding import Encoder
from atoll.gateway.templates.renderers_bridge import RenderersBridge
from atoll.gateway.templates.replies import END_THINK, THINK, ParsedReply, ReplyParser
from atoll.gateway.templates.tool_calls import TOOL_FORMATS
from atoll.gateway.templates.veil import REPLY_SENTINEL, SENTINEL
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Renderer, as_template_message
from atoll.wire.types import FinishReason, Int32, Message, ToolCall

Thinking = Literal["keep", "template"]
Tree = dict[str, Any]  # a message as templates read it

MAX_LENGTH = 1 << 20  # tokens of a context, unless the run says less
HEAD_BYTES = 64 << 20  # of token ids kept: of heads, and of conversations whose heads do not stand apart
_OVERHEAD = 512  # bytes of an entry beside its ids
_NO_DEMANDS = Demands()
_USER: Tree = {"role": "user", "content": "x"}
_SYSTEM: Tree = {"role": "system", "content": "x"}


@dataclass(frozen=True, slots=True)
class _Head:
    """System prompt and tools of a conversation, rendered and encoded apart from what follows."""

    ids: Int32
    stand_in: Sequence[Tree] | None  # what is rendered in its place; None: what follows does not stand apart
    stand_in_length: int = 0  # of the stand-in's text, in characters


class ChatFormat:
    """Template, tokenizer and reply format of a Hugging Face model folder."""

    def __init__(
        self,
        model_path: Path,
        *,
        thinking: Thinking,
        tool_format: str = "auto",
        renderer: str = "",
        max_length: int = MAX_LENGTH,
    ) -> None:
        """`thinking` in the history: "keep" what was sampled, or let the "template" remove it, which opens
        a branch. `tool_format`: a key of TOOL_FORMATS, or "auto": the one that reads what the template
        writes. `renderer`: name of a renderer of the package `renderers` that makes the suffixes instead.
        `max_length`: tokens of any context.

        Raises UserError if the folder, the names or the format are not usable. `prove` (proof.py) says more.
        """
        self._renderer = Renderer(model_path)
        self.model_path = model_path
        self.thinking = thinking
        self.renderer = renderer
        self.vocab_size = self._renderer.vocab_size
        self.stop_ids = self._renderer.stop_ids
        self.encoder = Encoder(self._renderer.tokenizer, self.stop_ids, max_length)
        self._cover = self.encoder.veil.cover
        self._stop_texts = [text for text, id in self.encoder.specials.items() if id in self.stop_ids]
        self._opening = np.empty(0, np.int32) if self._renderer.has_template else self.encoder.opening()
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()  # the one used last at the end
        self._head_bytes = 0
        self._learning = asyncio.Lock()
        self._bridge = RenderersBridge(renderer, self.encoder) if renderer else None
        self.tool_format = self._tool_format(tool_format)
        self._parser = ReplyParser(
            self.encoder.decode,
            frozenset(self.stop_ids),
            TOOL_FORMATS[self.tool_format],
            self.render([_USER]).rstrip().endswith(THINK),
        )
        self._shows_thinking = SENTINEL in self._render_thinking()
        self._strip_roles = frozenset(role for role in ("user", "tool", "system") if self._strips(role))

    @classmethod
    def of_section(cls, model_path: Path, section: GatewaySection, max_length: int = MAX_LENGTH) -> Self:
        """As the run's `[gateway]` has it."""
        return cls(
            model_path,
            thinking=section.thinking,
            tool_format=section.tool_format,
            renderer=section.renderer,
            max_length=max_length,
        )

    async def root(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), demands: Demands = _NO_DEMANDS
    ) -> Int32:
        """Token ids [T] of a whole conversation up to the reply, generation prompt included.

        System prompt and tools are rendered and encoded once, if the template writes them apart from the
        rest. Raises RequestError if the template refuses the messages.
        """
        messages = with_demands(messages, demands)
        head_end = 0  # the last message is never part of the head
        while head_end < len(messages) - 1 and messages[head_end].role == "system":
            head_end += 1
        if not head_end and not tools:
            return await self._encode_root(self.render(self.trees(messages)))
        with self._refusing():
            key = _digest(messages[:head_end], tools)
        if key not in self._heads:
            async with self._learning:
                if key not in self._heads:
                    self._keep(key, await self._learn_head(messages, head_end, tools))
        head = self._heads[key]
        self._heads.move_to_end(key)
        if head.stand_in is None:
            return await self._whole(messages, tools)
        text = self.render([*head.stand_in, *self.trees(messages[head_end:])])
        rest = await self.encoder.encode(text[head.stand_in_length :])
        return np.concatenate([head.ids, rest])

    async def suffix(
        self, new_messages: Sequence[Message], *, ended: bool, demands: Demands = _NO_DEMANDS
    ) -> Int32:
        """Token ids [T] that follow a sampled reply: the separator, the new messages, the generation prompt.
        If the reply did not end with a stop token (`ended` is False), the stop token comes first.

        The same whatever was said before. Raises RequestError if the template refuses the messages.
        """
        messages = with_demands(new_messages, demands)
        trees = self.trees(messages)
        if self._bridge is not None:
            return self._bridge.suffix(trees, ended=ended)
        ids = await self.encoder.encode(self._suffix_text(trees))
        return ids[1:] if ended else ids

    def branch_cause(self, new_messages: Sequence[Message], *, has_thinking: bool) -> str:
        """Why a branch has to be opened with `root` instead of a suffix: "thinking", if the template removes
        earlier thinking because of these messages (and `thinking` is "template"); "renderer", if the named
        renderer cannot append them; "" if a suffix will do.

        `has_thinking`: a reply in the branch has some.
        """
        if self._bridge is not None and any(message.role == "assistant" for message in new_messages):
            return "renderer"
        strips = any(message.role in self._strip_roles for message in new_messages)
        return "thinking" if self.thinking == "template" and has_thinking and strips else ""

    def has_thinking(self, token_ids: Int32) -> bool:
        """Whether a sampled reply, `token_ids` [T], has a block of thinking, even an empty one."""
        opening = self.encoder.decode(token_ids[:8].tolist())
        return self._parser.opens_thinking or opening.lstrip().startswith(THINK)

    @property
    def strip_roles(self) -> frozenset[str]:
        """Roles of new messages because of which the template removes earlier thinking."""
        return self._strip_roles

    def parse(
        self,
        token_ids: Int32,
        *,
        name: str,
        finish_reason: FinishReason,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
    ) -> ParsedReply:
        """What a client gets for sampled `token_ids` [T]. Ids of calls are `call_{name}_{number}`; `tools`
        give the types of arguments that a format writes as plain text."""
        return self._parser.parse(token_ids, name=name, finish_reason=finish_reason, stop=stop, tools=tools)

    def trees(self, messages: Sequence[Message]) -> list[Tree]:
        """Veiled, as the template reads them."""
        with self._refusing():
            return [self._tree(message) for message in messages]

    def tool_trees(self, tools: Sequence[Tool]) -> list[Tree]:
        with self._refusing():
            return [{**tool, "function": self.encoder.veil.cover_all(tool["function"])} for tool in tools]

    def render(self, trees: Sequence[Tree], tools: Sequence[Tree] = ()) -> str:
        """Text up to the reply. Raises RequestError if the template refuses the messages."""
        if not self._renderer.has_template:  # plain text ends a reply, too
            trees = [{**tree, "content": tree["content"] + self._end_of(tree["role"])} for tree in trees]
        with self._refusing():
            return self._renderer.render(trees, tools)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What a template cannot take, such as roles that it does not have or JSON that is too deep, is the
        client's error."""
        try:
            yield
        except (jinja2.TemplateError, TypeError, RecursionError) as error:
            reason = self.encoder.veil.lift(str(error))
            raise RequestError(
                400, "invalid_request", f"the model's chat template refuses these messages: {reason}"
            ) from None

    def _tree(self, message: Message) -> Tree:
        tree = as_template_message(message)
        veil = self.encoder.veil
        for key in ("content", "reasoning_content", "tool_call_id"):
            if key in tree:
                tree[key] = veil.cover(tree[key])
        if message.thinking and not self._shows_thinking:
            tree["content"] = f"{THINK}\n{tree.pop('reasoning_content')}\n{END_THINK}\n\n{tree['content']}"
        for call in tree.get("tool_calls", ()):
            call["id"] = veil.cover(call["id"])
            call["function"] = {key: veil.cover_all(value) for key, value in call["function"].items()}
        return tree

    def _end_of(self, role: str) -> str:
        return self._stop_texts[0] if role == "assistant" else ""

    async def _encode_root(self, text: str) -> Int32:
        ids = await self.encoder.encode(text)
        return np.concatenate([self._opening, ids]) if self._opening.size else ids

    async def _whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32:
        """A conversation whose head does not stand apart. The sessions of a group begin with the same one."""
        key = _digest(messages, tools)
        if key not in self._heads:
            text = self.render(self.trees(messages), self.tool_trees(tools))
            self._keep(key, _Head(await self._encode_root(text), None))
        self._heads.move_to_end(key)
        return self._heads[key].ids

    async def _learn_head(self, messages: Sequence[Message], head_end: int, tools: Sequence[Tool]) -> _Head:
        """Renders the whole conversation, and its head apart from it if that gives the same ids."""
        trees, tool_trees = self.trees(messages), self.tool_trees(tools)
        text = self.render(trees, tool_trees)
        stand_in = [_SYSTEM] if head_end else []
        length = self._head_length(trees[:head_end], tool_trees)
        stand_in_length = self._head_length(stand_in, ())
        rest = text[length:]
        if length and self.render([*stand_in, *trees[head_end:]])[stand_in_length:] == rest:
            ids = await self._encode_root(text[:length])
            together = np.concatenate([ids, await self.encoder.encode(rest)])
            if np.array_equal(together, await self._encode_root(text)):
                return _Head(ids, stand_in, stand_in_length)
        return _Head(np.empty(0, np.int32), None)

    def _keep(self, key: bytes, head: _Head) -> None:
        if key in self._heads:  # learnt twice at the same time
            return
        head.ids.flags.writeable = False
        self._heads[key] = head
        self._head_bytes += head.ids.nbytes + _OVERHEAD
        while self._head_bytes > HEAD_BYTES and len(self._heads) > 1:
            self._head_bytes -= self._heads.popitem(last=False)[1].ids.nbytes + _OVERHEAD

    def _head_length(self, head: Sequence[Tree], tools: Sequence[Tree]) -> int:
        """Characters before the special token that begins the first message behind the head."""
        text = self.render([*head, {"role": "user", "content": SENTINEL}], tools)
        return self.encoder.last_special(text[: text.find(SENTINEL)])

    def _suffix_text(self, new: Sequence[Tree]) -> str:
        """Veiled text from the stop token of the reply on. The sentinel stands before the first new message's
        content; the last stop token before it ends the reply."""
        before = [_USER, _reply_to_be_followed_by(new[0])]
        role, content = new[0]["role"], new[0]["content"]
        marked = self.render([*before, {**new[0], "content": SENTINEL + content}, *new[1:]])
        if content[:1].strip() and role != "assistant":
            text = marked.replace(SENTINEL, "")
        else:  # templates trim blanks, and look at what an assistant said
            text = self.render([*before, *new])
        place = marked.find(SENTINEL)
        if place < 0:
            raise RequestError(
                400, "invalid_request", f"the model's chat template shows no messages of role {role}"
            )
        cut = max(text.rfind(stop, 0, place) for stop in self._stop_texts)
        if text[:place] != marked[:place] or cut < text.rfind(REPLY_SENTINEL, 0, place):
            raise RequestError(
                400,
                "invalid_request",
                f"the model's chat template ends no reply before a message of role {role}",
            )
        return text[cut:]

    def _tool_format(self, wanted: str) -> str:
        if wanted in TOOL_FORMATS:
            return wanted
        if wanted != "auto":
            raise UserError(
                f"tool format: got {wanted!r}, expected one of auto, {', '.join(TOOL_FORMATS)}; choose one"
            )
        text = self.reply_text(Message("assistant", "", (ToolCall("call_0", "f", '{"k": "v w"}'),)))
        for name, find_calls in TOOL_FORMATS.items():
            calls = find_calls(text, ()).calls
            if [(called, orjson.loads(arguments)) for called, arguments in calls] == [("f", {"k": "v w"})]:
                return name
        return "none"

    def reply_text(self, reply: Message) -> str:
        """What the template writes for a reply: behind the generation prompt, up to the stop token. "" if it
        refuses the reply."""
        try:
            before = self.render([_USER])
            text = self.render([_USER, *self.trees([reply])], ())
        except RequestError:
            return ""
        text = text[len(os.path.commonprefix([before, text])) :]  # noqa: RUF071 (of characters)
        ends = [place for stop in self._stop_texts if (place := text.find(stop)) >= 0]
        return self.encoder.veil.lift(text[: min(ends, default=len(text))])

    def _strips(self, role: str) -> bool:
        """Whether a new message of `role` makes the template remove thinking before it. A template that knows
        nothing of thinking removes none: it stands in the content."""
        new: Tree = {"role": role, "content": "x", "tool_call_id": "call_0"}
        try:
            return self._shows_thinking and SENTINEL not in self._render_thinking(new)
        except RequestError:
            return False

    def _render_thinking(self, *new: Tree) -> str:
        reply = _reply_to_be_followed_by(new[0] if new else _USER)
        return self.render([_USER, {**reply, "reasoning_content": SENTINEL}, *new])


def _reply_to_be_followed_by(new: Tree) -> Tree:
    """A reply that any template shows; a tool's message follows a call."""
    reply: Tree = {"role": "assistant", "content": REPLY_SENTINEL}
    if new["role"] == "tool":
        function = {"name": "f", "arguments": {"k": REPLY_SENTINEL}}
        id = new.get("tool_call_id", "call_0")
        reply["tool_calls"] = [{"id": id, "type": "function", "function": function}]
    return reply


def _digest(messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
    tree = [[*message[:2], [[*call] for call in message.tool_calls], *message[3:]] for message in messages]
    return hashlib.blake2b(orjson.dumps([tree, tools]), digest_size=16).digest()
