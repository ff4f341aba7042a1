"""One policy update beside a plain padded transformers loop, on the work of the quickstart.

Interleaved in one process on one thread, fp32, in CPU seconds; every round draws new tokens. Both sides
do forward, PPO loss, backward, clipping and fused AdamW, and count the same tokens: those of 128 samples.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.cli.arithmetic import build_arithmetic
from services.config.schema import OptimizerConfig
from services.runtime.model_spec import read_spec
from services.trainer import cpu_compat
from services.trainer.attention import SHARES_PREFIX
from services.trainer.forward import Forward
from services.trainer.loss import ppo_clip
from services.trainer.model import build, initialize_parallel
from services.trainer.objective import PolicyObjective, PolicySettings
from services.trainer.step import Learner
from services.wire.types import PolicyBatch, Segments, StepKey

PROMPTS, SAMPLES, PROMPT_TOKENS, MAX_NEW_TOKENS = 16, 8, 6, 8
FIRST_TOKEN, VOCAB_SIZE = 3, 64  # below: special tokens
CLIP = 0.2
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)


@dataclass(frozen=True)
class Work:
    """128 samples: P prompts of 6 tokens, N samples of 1 to 8 response tokens."""

    prompts_PT: np.ndarray
    responses: list[np.ndarray]
    advantages_N: np.ndarray

    @property
    def num_response_tokens(self) -> int:
        return sum(map(len, self.responses))

    @property
    def num_tokens(self) -> int:
        return len(self.responses) * PROMPT_TOKENS + self.num_response_tokens


def run(rounds: int = 30) -> dict[str, object]:
    """Tokens per CPU second, medians over `rounds`, and their ratio to the plain loop."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_arithmetic(Path(folder), seed=0)
        _join_alone()
        sides = {
            "transformers_padded": plain_loop(Path(folder, "model")),
            **{name: learner(Path(folder, "model"), name) for name in SHARES_PREFIX},
        }
        return measure(sides, rounds)


def measure(sides: dict[str, Callable[[Work], None]], rounds: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 3):
        work = draw(rng)
        for name, update in sides.items():
            start = time.process_time()
            update(work)
            if number >= 3:  # the first rounds fill caches
                rates[name].append(work.num_tokens / (time.process_time() - start))
    medians = {name: median(values) for name, values in rates.items()}
    plain = medians["transformers_padded"]
    return {
        "tokens_per_cpu_s": medians,
        "ratio_to_transformers": {name: medians[name] / plain for name in SHARES_PREFIX},
    }


def draw(rng: np.random.Generator) -> Work:
    lengths = rng.integers(1, MAX_NEW_TOKENS + 1, PROMPTS * SAMPLES)
    return Work(
        rng.integers(FIRST_TOKEN, VOCAB_SIZE, (PROMPTS, PROMPT_TOKENS)),
        [rng.integers(FIRST_TOKEN, VOCAB_SIZE, n) for n in lengths.tolist()],
        rng.normal(size=PROMPTS * SAMPLES),
    )


def plain_loop(folder: Path) -> Callable[[Work], None]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.learning_rate, fused=True)

    def update(work: Work) -> None:
        ids_NT, mask_NT, is_response_NT = pad(work)
        logits_NTV = model(input_ids=ids_NT, attention_mask=mask_NT).logits[:, :-1]
        logprobs_NT = torch.log_softmax(logits_NTV, -1).gather(-1, ids_NT[:, 1:, None])[..., 0]
        ratio_NT = (logprobs_NT - logprobs_NT.detach()).exp()
        advantages_N1 = torch.from_numpy(work.advantages_N).float()[:, None]
        clipped_NT = ratio_NT.clamp(1 - CLIP, 1 + CLIP)
        loss_NT = torch.maximum(-advantages_N1 * ratio_NT, -advantages_N1 * clipped_NT)
        loss = (loss_NT * is_response_NT[:, 1:]).sum() / work.num_response_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return update


def pad(work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and response mask, each [N, T]; padding on the right."""
    width = PROMPT_TOKENS + max(map(len, work.responses))
    ids_NT = np.zeros((len(work.responses), width), np.int64)
    ids_NT[:, :PROMPT_TOKENS] = np.repeat(work.prompts_PT, SAMPLES, 0)
    lengths_N1 = np.array([[PROMPT_TOKENS + len(response)] for response in work.responses])
    for ids_T, response in zip(ids_NT, work.responses, strict=True):
        ids_T[PROMPT_TOKENS : PROMPT_TOKENS + len(response)] = response
    mask_NT = np.arange(width) < lengths_N1
    is_response_NT = mask_NT & (np.arange(width) >= PROMPT_TOKENS)
    return torch.from_numpy(ids_NT), torch.from_numpy(mask_NT).long(), torch.from_numpy(is_response_NT)


def learner(folder: Path, attention: str) -> Callable[[Work], None]:
    with cpu_compat.apply():
        model = build(folder, read_spec(folder))
        forward = Forward(model, max_tokens=8192, shares_prefix=SHARES_PREFIX[attention], temperature=1.0)
        objective = PolicyObjective(forward, PolicySettings(partial(ppo_clip, clip_low=CLIP, clip_high=CLIP)))
        trainer = Learner("actor", forward, {PolicyBatch: objective}, OPTIMIZER)
    steps = iter(range(1_000_000))

    def update(work: Work) -> None:
        key = StepKey("benchmark", next(steps), 0, "actor")
        trainer.forward_backward(key, to_batch(work))
        trainer.optim_step(key, OPTIMIZER.learning_rate)

    return update


def to_batch(work: Work) -> PolicyBatch:
    """Each prompt once, then its samples."""
    tokens, samples, weights, advantages, parents = [], [], [], [], []
    for p, prompt in enumerate(work.prompts_PT):
        own = range(p * SAMPLES, (p + 1) * SAMPLES)
        tokens += [prompt, *(work.responses[n] for n in own)]
        samples += [-1, *own]
        weights += [0.0, *[1 / work.num_response_tokens] * SAMPLES]
        advantages += [0.0, *work.advantages_N[own.start : own.stop]]
        parents += [-1, *[p * (SAMPLES + 1)] * SAMPLES]
    lengths = [len(part) for part in tokens]
    segments = Segments(
        np.concatenate(tokens).astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array(parents, np.int32),
        np.repeat(np.arange(PROMPTS, dtype=np.int32), SAMPLES + 1),
    )
    zeros_T = np.zeros(sum(lengths), np.float32)
    return PolicyBatch(
        segments,
        samples=np.repeat(np.array(samples, np.int32), lengths),
        loss_weights=np.repeat(np.array(weights, np.float32), lengths),
        advantages=np.repeat(np.array(advantages, np.float32), lengths),
        rollout_logprobs=zeros_T,
        old_logprobs=None,
        ref_logprobs=None,
    )


def _join_alone() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    initialize_parallel(tensor=1, data=1)


if __name__ == "__main__":
    print(run())
