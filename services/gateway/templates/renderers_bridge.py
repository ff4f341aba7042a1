"""Renders suffixes with the package `renderers`, for model families whose templates do not extend."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.gateway.conversation import RequestError
from atoll.gateway.templates.encoding import Encoder
from atoll.runtime.errors import UserError
from atoll.wire.types import Int32

_PROMPT_TAIL = 16  # ids of the prompt before the reply: a renderer looks no further back


class RenderersBridge:
    def __init__(self, name: str, encoder: Encoder) -> None:
        """`name` as `renderers` has it, such as "qwen3". Raises UserError if it is unknown, or the package is
        not installed."""
        try:
            from pydantic import TypeAdapter
            from renderers import configs
            from renderers.base import create_renderer
        except ImportError as error:
            raise UserError(
                f"renderer: got {name!r}, which needs the package renderers: {error}; "
                "pip install 'atoll[renderers]'"
            ) from None
        try:
            settings = {"name": name}
            config: Any = TypeAdapter(configs.RendererConfig).validate_python(settings)
            fields = type(config).model_fields
            if "thinking_retention" in fields:  # a new branch is the gateway's to open
                config = config.model_copy(update={"thinking_retention": "all"})
            self._renderer: Any = create_renderer(_Tokenizer(encoder), config)
        except Exception as error:  # of somebody else's code: whatever it says, it cannot be used
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"renderer: got {name!r}, expected a renderer for this tokenizer: {reason}; correct the name"
            ) from None
        prompt = self._renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
        self._prompt = list(prompt)[-_PROMPT_TAIL:]
        # a reply must not end within thinking, which the prompt may have opened
        self._reply = encoder.encode_now("</think>x" if "</think>" in encoder.specials else "x").tolist()
        self._stop = self._renderer.get_stop_token_ids()[0]

    def suffix(self, new: Sequence[dict[str, Any]], *, ended: bool) -> Int32:
        """See ChatFormat.suffix. Raises RequestError if the renderer cannot append the messages."""
        reply = [*self._reply, self._stop]
        bridged = self._renderer.bridge_to_next_turn(self._prompt, reply, list(new))
        if bridged is None:
            raise RequestError(400, "invalid_request", "the renderer cannot append these messages")
        start = len(self._prompt) + len(self._reply) + ended
        return np.array(bridged.token_ids[start:], np.int32)


class _Tokenizer:
    """An encoder in the form that `renderers` asks for; texts are veiled."""

    name_or_path = ""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.unk_token_id = None

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        ids: list[int] = self._encoder.encode_now(text).tolist()
        return ids

    def decode(self, token_ids: Any, *_: object, **__: object) -> str:
        return self._encoder.decode(list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._encoder.token_id(tokens)
        return [self._encoder.token_id(token) for token in tokens]
