"""Log-probabilities and attention by themselves: parts 6 and 7.

Letters in shapes: N target tokens, H hidden size, V vocabulary, T tokens, D size of a head.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import median

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from atoll.trainer.losses.logprobs import token_logprobs
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.context import ContextSplit
from atoll.trainer.megatron.upload import upload
from atoll.wire.types import Segments
from benchmarks.gpu.report import Row
from benchmarks.gpu.timing import median_milliseconds, milliseconds
from benchmarks.updates import draw_work, join_alone, to_batch

CUDA = torch.device("cuda")
TOKENS, VOCABULARY = 16_384, 151_936
HIDDEN_SIZES = (896, 1536, 3584)  # of Qwen2.5 0.5B, 1.5B, 7B
CHUNKS = tuple(1 << power for power in range(24, 30))  # logits
QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 28, 4, 128  # Qwen2.5 7B's
NUM_TREES, SAMPLES, PROMPT, LONGEST = 20, 16, 1024, 8192


def logprobs(
    device: torch.device = CUDA,
    num_tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    hidden_sizes: Sequence[int] = HIDDEN_SIZES,
    chunks: Sequence[int] = CHUNKS,
) -> Iterator[Row]:
    """Forward and backward by size of a chunk, beside whole logits, and beside the matrix products alone."""
    join_alone()
    group = parallel_state.get_tensor_model_parallel_group()
    targets_N = torch.randint(vocabulary, (num_tokens,), device=device)
    for hidden in hidden_sizes:
        hidden_NH = torch.randn(num_tokens, hidden, device=device).bfloat16().requires_grad_()
        weight_VH = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).bfloat16().requires_grad_()

        def chunked(size: int, hidden_NH: Tensor = hidden_NH, weight_VH: Tensor = weight_VH) -> None:
            logprobs_N, _ = token_logprobs(hidden_NH, weight_VH, targets_N, 1.0, group, chunk_logits=size)
            logprobs_N.sum().backward()  # type: ignore[no-untyped-call]

        def whole(hidden_NH: Tensor = hidden_NH, weight_VH: Tensor = weight_VH) -> None:
            logits_NV = (hidden_NH @ weight_VH.T).float()
            logits_NV.log_softmax(-1).gather(-1, targets_N[:, None]).sum().backward()  # type: ignore[no-untyped-call]

        for size in chunks:
            took = median_milliseconds(lambda size=size: chunked(size), device)  # type: ignore[misc]
            yield Row(f"H {hidden}, chunks of 2^{size.bit_length() - 1} logits", f"{took:.1f} ms")
        yield Row(f"H {hidden}, whole logits", f"{median_milliseconds(whole, device):.1f} ms")
        floor = median_milliseconds(lambda: _products(hidden_NH.detach(), weight_VH.detach()), device)  # noqa: B023
        yield Row(f"H {hidden}, the four matrix products alone", f"{floor:.1f} ms")


def _products(hidden_NH: Tensor, weight_VH: Tensor, at_once: int = 2048) -> None:
    """Logits, logits again, and both gradients."""
    for rows_nH in torch.split(hidden_NH, at_once):
        for _ in range(2):
            logits_nV = rows_nH @ weight_VH.T
        _ = logits_nV @ weight_VH, logits_nV.T @ rows_nH


def attention(
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    num_trees: int = NUM_TREES,
    num_samples: int = SAMPLES,
    prompt: int = PROMPT,
    longest: int = LONGEST,
) -> Iterator[Row]:
    """Forward and backward of one layer on trees of new shapes: the first call of a shape, and the second."""
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, num_samples, prompt, longest) for _ in range(num_trees)]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    for name in BACKENDS:
        if name == "flash" and find_spec("flash_attn") is None:
            continue
        if name == "varlen" and device.type == "cpu":  # it has no kernel
            continue
        if not BACKENDS[name].shares_prefix:
            continue
        for uses_cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
            times = np.array([_first_and_second(name, tree, device, dtype) for tree in trees])
            label = f"{name}, {'with' if uses_cudnn else 'without'} cuDNN"
            tokens = sum(len(tree.token_ids) for tree in trees) / len(trees)
            yield Row(f"{label}, first call, {tokens:,.0f} tokens", f"{median(times[:, 0]):.1f} ms")
            yield Row(f"{label}, second call", f"{median(times[:, 1]):.1f} ms")
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def random_tree(rng: np.random.Generator, num_samples: int, prompt: int, longest: int) -> Segments:
    """A prompt and samples of log-normal lengths, most short."""
    lengths = np.exp(rng.normal(np.log(longest / 8), 1.0, (1, num_samples))).astype(int).clip(1, longest)
    return to_batch(draw_work(rng, 64, np.array([prompt]), lengths)).segments


def _first_and_second(
    name: str, segments: Segments, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    num_tokens = len(segments.token_ids)
    query_THD, key_TGD, value_TGD = (
        torch.randn(num_tokens, heads, HEAD_SIZE, device=device, dtype=dtype, requires_grad=True)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    )

    def layer() -> None:
        plan = upload(BACKENDS[name].plan(segments, device, ContextSplit()), device)
        plan.attend(query_THD, key_TGD, value_TGD).sum().backward()  # type: ignore[no-untyped-call]

    return milliseconds(layer, device), milliseconds(layer, device)
