"""Peak memory of log-probabilities, forward and backward, beside the whole [tokens, vocabulary] logits.

Each measurement is a process of its own: `python -m benchmarks.chunked_logprobs chunked|naive TOKENS`. Hidden
states, the output weight and the gradients of both are taken off: both sides need them.
"""

import json
import sys
import time
from typing import Any

import torch
from megatron.core import parallel_state

from atoll.trainer.losses.logprobs import token_logprobs
from benchmarks.memory import measured_apart, peak_mib, resident_mib
from benchmarks.updates import join_alone

VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS = 151_936, 256, 16_384
NAIVE_TOKENS = 1024  # naive would hold 35 GiB at 16,384; it grows in proportion


def run() -> dict[str, Any]:
    chunked = measured_apart(__spec__.name, "chunked", str(NUM_TOKENS))
    naive = measured_apart(__spec__.name, "naive", str(NAIVE_TOKENS))
    scaled = naive * NUM_TOKENS / NAIVE_TOKENS
    return {
        "vocabulary": VOCAB_SIZE,
        "tokens": NUM_TOKENS,
        "chunked_peak_mib": chunked,
        f"naive_peak_mib_measured_at_{NAIVE_TOKENS}_tokens": naive,
        "naive_peak_mib_scaled_by_tokens": scaled,
        "chunked_to_naive": chunked / scaled,
    }


def peak_of(kind: str, num_tokens: int) -> float:
    """MiB above the inputs and their gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_NH = torch.randn(num_tokens, HIDDEN_SIZE, requires_grad=True)
    weight_VH = (0.02 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE)).requires_grad_()
    targets_N = torch.randint(VOCAB_SIZE, (num_tokens,))
    before = resident_mib()
    start = time.process_time()
    if kind == "chunked":
        join_alone()
        group = parallel_state.get_tensor_model_parallel_group()
        logprobs_N, _ = token_logprobs(hidden_NH, weight_VH, targets_N, 1.0, group)
    else:
        logits_NV = hidden_NH @ weight_VH.T
        logprobs_N = torch.log_softmax(logits_NV, -1).gather(-1, targets_N[:, None])[:, 0]
    logprobs_N.mean().backward()  # type: ignore[no-untyped-call]
    print(f"{kind}: {time.process_time() - start:.1f} CPU s", file=sys.stderr)
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in (hidden_NH, weight_VH)) / 2**20
    return peak_mib() - before - gradients


if __name__ == "__main__":
    print(json.dumps(peak_of(sys.argv[1], int(sys.argv[2]))))
