"""Renders and tokenizes messages as `transformers` does, without importing it or torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import orjson
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from atoll.runtime.errors import UserError
from atoll.runtime.hub import missing_model
from atoll.runtime.tokenizer import tokenizer_digest
from atoll.wire.types import Int32, Message

Messages = Sequence[Mapping[str, Any]]  # {"role": ..., "content": ...}, and what else the template reads
Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


def as_template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: the arguments of a tool call are the object that their JSON text
    stands for, or the text if it is no object."""
    tree: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        tree["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(text)}}
            for id, name, text in message.tool_calls
        ]
    if message.thinking:
        tree["reasoning_content"] = message.thinking
    if message.tool_call_id:
        tree["tool_call_id"] = message.tool_call_id
    return tree


def _arguments(text: str) -> object:
    try:
        arguments = json.loads(text)
        if "\\u" in text:
            orjson.loads(text)  # refuses lone surrogates, which no tokenizer takes
    except (ValueError, RecursionError):  # integers of thousands of digits too
        return text
    return arguments if isinstance(arguments, dict) else text


class Renderer:
    """The tokenizer and chat template of a Hugging Face model folder."""

    def __init__(self, model_path: Path) -> None:
        """Raises UserError if the folder is not a model folder, if its chat template is none, or if its
        tokenizer does not match the model.
        """
        model = _read_json(
            model_path / "config.json",
            missing_model(model_path),
        )
        settings = _read_json(model_path / "tokenizer_config.json", "copy it from the original model")
        self.tokenizer = load_tokenizer(model_path)
        self.digest = tokenizer_digest(model_path)
        special = dict(_special_tokens(settings))
        template = _chat_template(model_path, settings)
        self.has_template = template is not None
        try:
            self._template = None if template is None else _environment(special).from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{model_path}: line {error.lineno} of the chat template is not valid Jinja: "
                f"{error.message}; copy it from the original model"
            ) from None

        self.vocab_size = _vocab_size(model, model_path)
        eos = self.tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        declared = [
            *_declared_eos(model_path / "generation_config.json"),
            *_as_ids(model.get("eos_token_id")),
        ]
        ids = declared if eos is None else [eos, *declared]
        if not ids:
            raise UserError(
                f"{model_path}: no end-of-sequence token: expected eos_token in tokenizer_config.json or "
                "eos_token_id in generation_config.json or config.json; add one, or no response can end"
            )
        self.eos_id = ids[0]
        self.stop_ids = tuple(sorted(set(ids)))
        self._check_ids_fit(model_path)
        added = self.tokenizer.get_added_tokens_decoder()
        # what a template can write to end a message
        self.stop_texts = {token.content: id for id, token in added.items() if id in self.stop_ids}

    def render(self, messages: Messages, tools: Tools = (), *, add_generation_prompt: bool = True) -> str:
        """The conversation's text; with `add_generation_prompt`, up to the assistant's next message.

        A model without a chat template gets the messages' contents joined as plain text, and no tools.
        Raises jinja2.TemplateError if the template refuses the messages.
        """
        if self._template is None:
            return "".join(message["content"] for message in messages)
        return self._template.render(
            messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
        )

    def encode_prompts(self, texts: Sequence[str]) -> list[Int32]:
        """Token ids [T] of each rendered prompt. A chat template writes its own special tokens; plain
        text gets those that the tokenizer puts around a sequence, such as a BOS token."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._template is None)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_parts(self, texts: Sequence[str], *, are_first: bool) -> list[Encoding]:
        """Tokens of parts of rendered text, with the characters that they stand for: of those that begin it,
        or of later ones."""
        return self.tokenizer.encode_batch(
            list(texts), add_special_tokens=are_first and self._template is None
        )

    def _check_ids_fit(self, model_path: Path) -> None:
        token, highest = max(self.tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
        if highest >= self.vocab_size:
            raise UserError(
                f"{model_path}: the tokenizer does not match the model: token {token!r} has id {highest}, "
                f"expected ids below the model's vocab_size {self.vocab_size}; "
                "copy tokenizer.json from the folder that the weights came from"
            )
        if max(self.stop_ids) >= self.vocab_size or min(self.stop_ids) < 0:
            raise UserError(
                f"{model_path}: got end-of-sequence ids {list(self.stop_ids)}, expected ids in the model's "
                f"vocabulary of {self.vocab_size}; correct eos_token_id in (generation_)config.json"
            )


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Raises UserError if the folder has none that can be read."""
    path = model_path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing; write it with transformers, "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not a tokenizer: {error}; copy it from the original model") from None
    # the file may ask to cut or pad every text: prompts must stay whole
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {advice}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}; {advice}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: got a JSON {type(tree).__name__}, expected an object; {advice}")
    return tree


def _vocab_size(model: Mapping[str, Any], model_path: Path) -> int:
    size = model.get("vocab_size")
    if not isinstance(size, int):
        raise UserError(
            f"{model_path / 'config.json'}: vocab_size: got {size!r}, expected an integer; "
            "is this the folder of a language model?"
        )
    return size


def _declared_eos(path: Path) -> list[int]:
    """generation_config.json is optional in a model folder."""
    return _as_ids(_read_json(path, "correct or remove it").get("eos_token_id")) if path.exists() else []


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """("eos_token", "<eos>") and the like; a token is a string or an object with its content."""
    for name, value in settings.items():
        if name.endswith("_token"):
            if isinstance(value, str):
                yield name, value
            elif isinstance(value, dict):
                yield name, value["content"]


def _chat_template(model_path: Path, settings: Mapping[str, Any]) -> str | None:
    """The file wins over tokenizer_config.json; of several named templates, the default one counts."""
    path = model_path / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template: str | list[dict[str, str]] | None = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _environment(special_tokens: Mapping[str, str]) -> ImmutableSandboxedEnvironment:
    """Jinja environment as chat templates expect it; sandboxed, since templates are downloaded code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        special_tokens, raise_exception=_raise_exception, strftime_now=datetime.now().strftime
    )
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
