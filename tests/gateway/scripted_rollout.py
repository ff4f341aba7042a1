"""`python -m tests.gateway.scripted_rollout`: a rollout replica whose sampler is told what to draw.

A context with a line `SCRIPT: ["first reply", "second reply"]` (JSON) gets these replies, one a turn; others
are drawn as ever. Which tokens stand for a reply is drawn, too: a text has many tokenizations, and a model is
free to choose any. Log-probabilities stay the model's. The file named by SCRIPTED_LOG gets a line for each
turn that the engine finished: its id, its tokens and why it ended.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer

from atoll.rollout.engines import local, local_decoder
from atoll.rollout.engines.local_decoder import Decoder
from atoll.rollout.service import RolloutService
from atoll.runtime.process import run_service
from atoll.wire.types import Float32, Int64, TurnRequest

ROLES = ("<|im_start|>assistant", "<|start_header_id|>assistant")
MARK = "SCRIPT: "


def scripted_reply(request: TurnRequest, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens of the reply that the context's script has for its next turn; None: it has no script."""
    text = tokenizer.decode(request.context_ids.tolist(), skip_special_tokens=False)
    if MARK not in text:
        return None
    replies, _ = json.JSONDecoder().raw_decode(text[text.rindex(MARK) + len(MARK) :])
    after = text[text.rindex(MARK) :]
    # where no role is written, every reply ends with the stop token
    turn = max(max(after.count(role) for role in ROLES) - 1, after.count("<|endoftext|>"))
    reply = replies[min(turn, len(replies) - 1)]
    return [
        *_some_tokens(reply, tokenizer, random.Random(str(request.ids[0]))),
        *request.sampling.stop_token_ids[:1],
    ]


def _some_tokens(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Tokens that decode to the text: those of its pieces, which are cut at random outside special tokens."""
    special = sorted((token.content for token in tokenizer.get_added_tokens_decoder().values()), key=len)
    ids: list[int] = []
    at = 0
    while at < len(text):
        found = next((token for token in reversed(special) if text.startswith(token, at)), None)
        end = at + len(found) if found else min(at + rng.randint(1, 12), len(text))
        if not found:
            ahead = [text.find(token, at, end) for token in special]
            end = min([end, *(start for start in ahead if start > at)])
        ids += tokenizer.encode(text[at:end], add_special_tokens=False).ids
        at = end
    return ids


class ScriptedDecoder(Decoder[Any]):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._scripts: dict[Any, list[int] | None] = {}  # by turn
        self._log = Path(os.environ["SCRIPTED_LOG"]) if "SCRIPTED_LOG" in os.environ else None

    def _advance(self, first: int, logits_RV: torch.Tensor) -> Any:
        rows = self._running[first:]
        forced = [
            self._token(row.ticket, int(self._rows["produced"][first + n])) for n, row in enumerate(rows)
        ]

        def draw(logits_BV: torch.Tensor, *settings: Any) -> tuple[Int64, Float32]:
            untouched_BV = logits_BV.clone()
            tokens_B, logprobs_B = local_decoder_draw(logits_BV, *settings)
            for row, token in enumerate(forced):
                if token is not None:
                    tokens_B[row] = token
                    logprobs_B[row] = torch.log_softmax(untouched_BV[row], -1)[token]
            return tokens_B, logprobs_B

        with patch.object(local_decoder, "draw", draw):
            return super()._advance(first, logits_RV)

    def _token(self, ticket: Any, produced: int) -> int | None:
        if ticket.id not in self._scripts:
            self._scripts[ticket.id] = scripted_reply(ticket.request, self._tokenizer)
        script = self._scripts[ticket.id]
        return None if script is None or produced >= len(script) else script[produced]

    def _finish(self, ended: Sequence[Any]) -> Any:
        finished = super()._finish(ended)
        if self._log is not None and finished:
            with self._log.open("a") as log:
                for _, completion in finished:
                    self._scripts.pop(completion.id, None)
                    line = {
                        "id": str(completion.id),
                        "ids": np.asarray(completion.token_ids).tolist(),
                        "end": completion.finish_reason.value,
                    }
                    log.write(json.dumps(line) + "\n")
        return finished


local_decoder_draw = local_decoder.draw

if __name__ == "__main__":
    with patch.object(local, "Decoder", ScriptedDecoder):
        run_service("rollout", RolloutService.build)
