"""Requests to and responses from SGLang's HTTP server. Pure.

Ids and log-probabilities go by /generate, one sample a call. Letter in shapes: T tokens.
"""

import base64
import time
from typing import Any

import numpy as np

from atoll.rollout.engines.base import Completion
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.model_spec import ModelSpec
from atoll.wire.types import (
    FinishReason,
    Float32,
    Int32,
    Routes,
    Sampling,
    TurnId,
    TurnRequest,
    Version,
    VersionSpan,
)

Json = dict[str, Any]


class SGLangError(AtollError):
    """SGLang refused a call or returned an invalid response."""


def version_text(version: Version) -> str:
    """The name of a version in SGLang."""
    return f"{version.lineage}/{version.number}"


def generate_body(
    request: TurnRequest,
    rid: str,
    version: Version,
    max_length: int,
    vocab_size: int,
    first_route: int | None = None,
) -> Json:
    """Asks for one sample. `version` keys the prefix cache: samples of one prompt share its keys and values,
    and none meets those of other weights. `first_route`: position from which on to record routes."""
    sampling = request.sampling
    room = max_length - len(request.context_ids)
    greedy = sampling.temperature == 0
    return {
        "rid": rid,
        "input_ids": request.context_ids.tolist(),
        "extra_key": version_text(version),
        "return_logprob": True,
        "return_sampling_mask": truncates(sampling),
        "return_routed_experts": first_route is not None,
        "routed_experts_start_len": first_route or 0,
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": _top_k(sampling, vocab_size),
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "ignore_eos": not sampling.stop_token_ids,  # it turns these off, too
        },
    }


def score_body(ids: Int32, version: Version) -> Json:
    """Asks for the log-probabilities of a sequence that is there."""
    return {
        "input_ids": ids.tolist(),
        "extra_key": version_text(version),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0},
    }


def parse_completion(
    answer: Json, id: TurnId, sampling: Sampling, started: float, routed: ModelSpec | None = None
) -> Completion:
    """A sequence that was aborted in SGLang's queue gets no tokens: of one that was retracted, SGLang returns
    only some, and not always their log-probabilities. `routed`: the model, if routes were asked for. Raises
    SGLangError if the answer is no completion."""
    meta = answer["meta_info"]
    if _ended_in_queue(meta):
        return aborted_completion(id)
    token_ids_T = np.array(answer["output_ids"], np.int32)
    if truncates(sampling):  # SGLang's other log-probabilities are those before tokens are cut off
        logprobs = meta.get("output_token_sampling_logprobs", [])
    else:
        logprobs = [logprob for logprob, *_ in meta.get("output_token_logprobs", [])]
    if len(logprobs) != len(token_ids_T) or None in logprobs:  # JSON has no NaN: SGLang says null
        raise SGLangError(
            f"{id}: SGLang gave {len(token_ids_T)} tokens and the log-probabilities "
            f"{logprobs[:4]}...; expected a finite one for each: the weights may be damaged"
        )
    reason = FinishReason(meta["finish_reason"]["type"])
    routes = None
    if routed is not None and reason is not FinishReason.ABORT:
        routes = _parse_routes(meta["routed_experts"], routed)
    return Completion(
        id=id,
        token_ids=token_ids_T,
        logprobs=np.array(logprobs, np.float32),
        spans=tuple(
            VersionSpan(_parse_version(span["version"]), span["start"], span["end"])
            for span in meta.get("weight_versions", [])
            if span["end"] > span["start"]
        ),
        finish_reason=reason,
        text=answer["text"],
        started=started,
        finished=time.time(),
        routes=routes,
    )


def _parse_routes(encoded: str, spec: ModelSpec) -> Routes:
    """[N, Y, C] of SGLang's int32."""
    assert spec.experts is not None
    routes_NYC = np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, *spec.route_shape)
    return routes_NYC.astype(spec.experts.route_dtype)


def num_prefilled(answer: Json) -> int:
    """Tokens of the context whose keys and values were not in the prefix cache; 0 for a sequence that was
    aborted in SGLang's queue, since its answer has no counts."""
    meta = answer["meta_info"]
    return 0 if _ended_in_queue(meta) else int(meta["prompt_tokens"]) - int(meta["cached_tokens"])


def aborted_completion(id: TurnId) -> Completion:
    """A sample that was aborted while it waited, here or in SGLang."""
    now = time.time()
    return Completion(
        id=id,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        spans=(),
        finish_reason=FinishReason.ABORT,
        text="",
        started=now,
        finished=now,
    )


def parse_scores(answer: Json) -> Float32:
    """[T-1] log-probabilities of all tokens but the first."""
    return np.array([logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)


def check_sampling(sampling: Sampling, vocab_size: int, max_candidates: int) -> None:
    """Raises UserError if SGLang cannot report log-probabilities of what it samples from: it does so for
    at most `max_candidates` tokens that are left to choose from."""
    candidates = _top_k(sampling, vocab_size)
    if truncates(sampling) and candidates > max_candidates:
        raise UserError(
            f"SGLang reports the log-probabilities of sampling with top_p = {sampling.top_p}, top_k = "
            f"{sampling.top_k} among at most {max_candidates} tokens, got up to {candidates}: set "
            f"rollout.sampling.top_k to 1 to {max_candidates}, or rollout.sglang.sampling_mask_max_tokens = "
            f"{candidates}, which costs memory and time"
        )


def truncates(sampling: Sampling) -> bool:
    """Whether some tokens cannot be drawn."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _top_k(sampling: Sampling, vocab_size: int) -> int:
    """As SGLang wants it: a number wherever a distribution is to be reported, else -1 for all."""
    if not truncates(sampling):
        return -1
    return min(sampling.top_k or vocab_size, vocab_size)


def _ended_in_queue(meta: Json) -> bool:
    """Whether it was aborted there: all other answers have counts."""
    return "prompt_tokens" not in meta


def _parse_version(text: str) -> Version:
    lineage, _, number = text.rpartition("/")
    return Version(lineage, int(number))
