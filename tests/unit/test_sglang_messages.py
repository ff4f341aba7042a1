"""What is said to SGLang, and what is made of its answers. The answers are SGLang 0.5.23's own."""

import base64
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from atoll.rollout.engines.sglang.arguments import arguments_of, environment_of, reserved_mib
from atoll.rollout.engines.sglang.messages import (
    SGLangError,
    check_sampling,
    generate_body,
    num_prefilled,
    parse_completion,
    parse_scores,
    score_body,
)
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import FinishReason, Sampling, TurnId, TurnRequest, Version, VersionSpan
from tests.builders import group_id, sample_id, turn_request

ID = TurnId(sample_id(7, 1), attempt=2)
V3, V4 = Version("a3f0", 3), Version("a3f0", 4)


def ask(sampling: Sampling) -> TurnRequest:
    return turn_request([7, 30, 12], group=group_id(7), indices=(0, 1), sampling=sampling)


def answer(**meta: object) -> dict[str, object]:
    return {
        "text": "m3",
        "output_ids": [36, 6],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "cached_tokens": 1,
            "output_token_logprobs": [[-2.5, 36, None], [-3.25, 6, None]],
            "weight_versions": [
                {"version": "a3f0/3", "start": 0, "end": 1},
                {"version": "a3f0/4", "start": 1, "end": 2},
            ],
            **meta,
        },
    }


def test_a_sample_is_asked_for_under_the_key_of_its_version() -> None:
    body = generate_body(ask(Sampling(9, stop=("\n",))), "1:x", V3, max_length=64, vocab_size=64)
    assert (body["rid"], body["input_ids"], body["extra_key"]) == ("1:x", [7, 30, 12], "a3f0/3")
    assert body["return_logprob"]
    assert not body["return_sampling_mask"]
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [],
        "stop": ["\n"],
        "ignore_eos": True,
    }
    with_stop = generate_body(ask(Sampling(9, stop_token_ids=(1,))), "1:x", V3, 64, 64)["sampling_params"]
    assert (with_stop["ignore_eos"], with_stop["stop_token_ids"]) == (False, [1])


def test_prompt_and_response_fit_together() -> None:
    body = generate_body(ask(Sampling(9)), "1:x", V3, max_length=8, vocab_size=64)
    assert body["sampling_params"]["max_new_tokens"] == 5  # 8 - 3


@pytest.mark.parametrize(
    ("sampling", "top_k", "top_p", "mask"),
    [
        (Sampling(9, top_p=0.9), 64, 0.9, True),
        (Sampling(9, top_k=5), 5, 1.0, True),
        (Sampling(9, top_k=500), 64, 1.0, True),
        (Sampling(9, temperature=0.0, top_k=5, top_p=0.5), -1, 1.0, False),  # greedy is greedy
    ],
)
def test_where_tokens_are_cut_off_the_distribution_is_asked_for(
    sampling: Sampling, top_k: int, top_p: float, mask: bool
) -> None:
    body = generate_body(ask(sampling), "1:x", V3, max_length=64, vocab_size=64)
    parameters = body["sampling_params"]
    assert (parameters["top_k"], parameters["top_p"], body["return_sampling_mask"]) == (top_k, top_p, mask)


def test_what_sglang_cannot_report_is_refused() -> None:
    check_sampling(Sampling(9), 151_936, 4096)
    check_sampling(Sampling(9, temperature=0.0, top_p=0.9), 151_936, 4096)
    check_sampling(Sampling(9, top_p=0.9, top_k=4096), 151_936, 4096)
    with pytest.raises(UserError, match=r"set rollout\.sampling\.top_k to 1 to 4096"):
        check_sampling(Sampling(9, top_p=0.9), 151_936, 4096)
    with pytest.raises(UserError, match="at most 4096 tokens, got up to 5000"):
        check_sampling(Sampling(9, top_k=5000), 151_936, 4096)


def test_an_answer_becomes_a_completion() -> None:
    got = parse_completion(answer(), ID, Sampling(2), started=5.0)
    assert got.id == ID
    assert got.token_ids.tolist() == [36, 6]
    assert got.logprobs.tolist() == [-2.5, -3.25]
    assert got.spans == (VersionSpan(V3, 0, 1), VersionSpan(V4, 1, 2))
    assert (got.finish_reason, got.text, got.started) == (FinishReason.LENGTH, "m3", 5.0)


def test_experts_are_asked_for_and_read(tiny_qwen3_moe: Path) -> None:
    """Of the model's 2 layers and 2 experts per token."""
    body = generate_body(ask(Sampling(9)), "1:x", V3, 64, 64, first_route=3)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 3)
    assert not generate_body(ask(Sampling(9)), "1:x", V3, 64, 64)["return_routed_experts"]
    sent = np.array([[[0, 3], [1, 2]], [[3, 1], [0, 1]]], "<i4")
    recorded = answer(routed_experts=base64.b64encode(sent.tobytes()).decode())
    got = parse_completion(recorded, ID, Sampling(2), 5.0, read_spec(tiny_qwen3_moe))
    assert got.routes is not None
    assert got.routes.dtype == np.uint8
    assert got.routes.tolist() == sent.tolist()
    aborted = answer(finish_reason={"type": "abort"})
    assert parse_completion(aborted, ID, Sampling(2), 5.0, read_spec(tiny_qwen3_moe)).routes is None


def test_where_tokens_are_cut_off_their_log_probabilities_count() -> None:
    cut = answer(output_token_sampling_logprobs=[-0.5, -1.5])
    got = parse_completion(cut, ID, Sampling(2, top_k=5), started=5.0)
    assert got.logprobs.tolist() == [-0.5, -1.5]


@pytest.mark.parametrize("logprobs", [[[None, 36, None], [-3.25, 6, None]], [[-2.5, 36, None]], []])
def test_a_token_without_a_finite_log_probability_is_an_error(logprobs: list[object]) -> None:
    with pytest.raises(SGLangError, match="2 tokens and the log-probabilities"):
        parse_completion(answer(output_token_logprobs=logprobs), ID, Sampling(2), started=5.0)


def test_a_sequence_aborted_in_sglangs_queue_comes_without_tokens() -> None:
    """It had been retracted: 50 of its tokens come, and no log-probabilities of what they were drawn from."""
    queued = {
        "text": "m" * 50,
        "output_ids": [36] * 50,
        "meta_info": {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "output_token_logprobs": [[-2.5, 36, None]] * 50,
            "weight_versions": [{"version": "a3f0/3", "start": 0, "end": 50}],
            "completion_tokens": 50,
        },
    }
    got = parse_completion(queued, ID, Sampling(60, top_k=5), started=5.0)
    assert (got.id, got.finish_reason, got.spans, got.text) == (ID, FinishReason.ABORT, (), "")
    assert (got.token_ids.tolist(), got.logprobs.tolist()) == ([], [])
    assert (num_prefilled(queued), num_prefilled(answer())) == (0, 2)


def test_scores_leave_out_the_first_token() -> None:
    assert score_body(np.array([7, 30], np.int32), V3)["logprob_start_len"] == 0
    scores = parse_scores({"meta_info": {"input_token_logprobs": [[None, 7, None], [-4.5, 30, None]]}})
    assert (scores.tolist(), scores.dtype) == ([-4.5], np.float32)


def test_every_key_becomes_an_argument_and_the_users_wins() -> None:
    user = {"max_total_tokens": 99, "sleep_on_idle": False, "cuda_graph_bs": [1, 2], "json_model": {"a": 1}}
    line = arguments_of(user, {"model_path": "m"}, "cpu", 2)
    pairs = dict(pairwise(line))
    assert (pairs["--max-total-tokens"], pairs["--grammar-backend"]) == ("99", "none")
    assert line[line.index("--cuda-graph-bs") + 1 :][:2] == ["1", "2"]
    assert (pairs["--json-model"], pairs["--model-path"], pairs["--tp-size"]) == ('{"a": 1}', "m", "2")
    assert "--disable-overlap-schedule" in line
    assert "--sleep-on-idle" not in line
    assert "--max-total-tokens" not in arguments_of({}, {}, "cuda", 1)


@pytest.mark.parametrize("key", ["port", "disable_overlap_schedule", "dp_size", "pp_size"])
def test_what_the_engine_decides_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"rollout\.sglang\.{key} cannot be set"):
        arguments_of({key: 1}, {}, "cpu", 1)


def test_a_replica_that_takes_turns_on_a_gpu_can_release_its_memory() -> None:
    assert "--enable-memory-saver" in arguments_of({}, {}, "cuda", 1, takes_turns=True)
    assert "--enable-memory-saver" not in arguments_of({}, {}, "cuda", 1)
    assert "--enable-memory-saver" not in arguments_of({}, {}, "cpu", 1, takes_turns=True)
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert allocator.items() <= environment_of("cuda", 1, 1, takes_turns=True).items()
    assert not allocator.keys() & environment_of("cuda", 1, 1).keys()


@pytest.mark.parametrize(
    ("transport", "staging", "takes_turns", "expected"),
    [
        ("nccl", "device", False, 3 + 2 * 300),  # communicators with two senders
        ("nccl", "host", False, 2 * 300),
        ("cuda_ipc", "device", False, 3),
        (
            "cuda_ipc",
            "device",
            True,
            5,
        ),  # weights go straight into the parameters, from the trainer's segment
        ("shm", "device", True, 0),
        ("shm", "host", False, 0),
    ],
)
def test_memory_for_pushes(transport: str, staging: str, takes_turns: bool, expected: int) -> None:
    shard_bytes = 2 * (1 << 20) + 1
    got = reserved_mib(
        shard_bytes, transport, staging=staging, takes_turns=takes_turns, segment_bytes=5 << 20
    )
    assert got == expected


def test_ranks_on_a_cpu_are_bound_to_cores() -> None:
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment_of("cpu", 1, 3)
    assert environment_of("cpu", 1, 3)["OMP_NUM_THREADS"] == "3"
    assert len(environment_of("cpu", 2, 1)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert "SGLANG_USE_CPU_ENGINE" not in environment_of("cuda", 2, 1)
