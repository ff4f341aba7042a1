"""A neural reward model in a trainer service: `atoll serve trainer --role reward_model`.

It has its own tokenizer, so it may belong to another model family and run outside of the run.
Option: `tokenizer`, the model's Hugging Face folder as the coordinator sees it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from atoll.external.grpc import Connection
from atoll.external.responses import OptionsModel, parse_options
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import ProtocolError, UserError
from atoll.wire.types import ExternalServer, Graded, GradingError, ScoreItem, Segments, Verdict

ROLE = "reward_model"


class _TrainerOptions(OptionsModel):
    tokenizer: Path


_OPTIONS = TypeAdapter(_TrainerOptions)


class TrainerRewards:
    """The value head's output after the last token of prompt and response."""

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        """Raises UserError if the option `tokenizer` does not lead to a tokenizer."""
        self.server = server
        file = parse_options(server, _OPTIONS).tokenizer / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_buffer(file.read_bytes())
        except (OSError, ValueError) as error:
            # do not reveal the coordinator's files to callers who register a server
            cause = "it is not a readable tokenizer" if server.address else str(error)
            raise UserError(f"{server}: option tokenizer: {file}: {cause}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._connection = Connection(server, token, partial(TrainerClient, role=ROLE))

    async def probe(self) -> str:
        async with self._connection.slot() as client:
            info = await client.info()
        if ROLE not in info.roles:
            raise ProtocolError(
                f"{self.server.url} holds {', '.join(info.roles)}, expected {ROLE}: "
                f"start it by `atoll serve trainer --role {ROLE}`"
            )
        return f"reward model {info.model}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        texts = [item.prompt + item.response for item in items]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        segments = Segments(
            token_ids=np.concatenate(ids),
            offsets=offsets,
            parents=np.full(len(ids), -1, np.int32),
            groups=np.arange(len(ids), dtype=np.int32),
        )
        async with self._connection.slot() as client:
            values_T = await client.compute_values(segments)
        values = values_T[offsets[1:] - 1].astype(np.float64)
        return [
            Graded(item.id, float(value), {})
            if np.isfinite(value)
            else GradingError(item.id, self.server.name, f"got {value}, expected a finite number", False)
            for item, value in zip(items, values, strict=True)
        ]

    async def close(self) -> None:
        await self._connection.close()
