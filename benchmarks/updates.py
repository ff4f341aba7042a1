"""One policy update beside a plain padded transformers loop: both sides, and the work that they do.

Both do forward, PPO loss, backward, clipping and fused AdamW in fp32 on one thread, and count the same
tokens: those of all samples, each with its own prompt.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from atoll.config.schema import OptimizerConfig, ParallelConfig
from atoll.runtime.model_spec import read_spec
from atoll.trainer.losses.loss import ppo_clip
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.forward import Budget, Forward
from atoll.trainer.megatron.hf import load_model
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.objective import PolicyObjective, PolicySettings
from atoll.trainer.step import Learner
from atoll.wire.types import PolicyBatch, Segments, StepKey
from benchmarks.memory import peak_mib, resident_mib

FIRST_TOKEN = 3  # below: special tokens
CLIP = 0.2
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
BUDGET = Budget(training=8192, forward=8192)
PLAIN_SETTINGS = ModelSettings()
PLAIN = "transformers_padded"
SIDES = (PLAIN, "shared_prefix", "segments")  # the trainer's attention backends that need no GPU
LONG_TAILED_MODEL = Qwen2Config(  # large enough that work per token counts most
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
EXPERTS_MODEL = Qwen3MoeConfig(  # few tokens for each expert, so that launches count most
    vocab_size=64,
    hidden_size=64,
    intermediate_size=256,
    moe_intermediate_size=32,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)

Int = np.ndarray  # of token ids
Update = Callable[["Work"], None]


@dataclass(frozen=True, eq=False)
class Work:
    """P prompts, each with its samples: N response lists in all, prompt after prompt."""

    prompts: Sequence[Int]
    responses: Sequence[Sequence[Int]]  # of each prompt
    advantages: Sequence[Sequence[float]]

    @cached_property
    def rows(self) -> list[tuple[Int, Int, float]]:
        """Prompt, response and advantage of each sample."""
        return [
            (prompt, response, advantage)
            for prompt, responses, advantages in zip(
                self.prompts, self.responses, self.advantages, strict=True
            )
            for response, advantage in zip(responses, advantages, strict=True)
        ]

    @cached_property
    def num_response_tokens(self) -> int:
        return sum(len(response) for _, response, _ in self.rows)

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(prompt) + len(response) for prompt, response, _ in self.rows)

    @cached_property
    def num_padded_tokens(self) -> int:
        return len(self.rows) * max(len(prompt) + len(response) for prompt, response, _ in self.rows)


def short_work(rng: np.random.Generator) -> Work:
    """The quickstart's: 16 prompts of 6 tokens, 8 samples each, of 1 to 8 tokens."""
    return draw_work(rng, 64, np.full(16, 6), rng.integers(1, 9, (16, 8)))


def long_tailed_work(rng: np.random.Generator, num_prompts: int = 16, num_samples: int = 1) -> Work:
    """Prompts of 32 to 128 tokens; responses log-normal around 100, 16 to 1024: most short, a few long."""
    lengths = np.exp(rng.normal(np.log(100), 1.0, (num_prompts, num_samples))).astype(int).clip(16, 1024)
    return draw_work(rng, 2048, rng.integers(32, 129, num_prompts), lengths)


def draw_work(rng: np.random.Generator, vocab_size: int, prompt_P: Int, response_PN: Int) -> Work:
    """Random tokens and advantages, of these lengths."""

    def tokens(length: int) -> Int:
        return rng.integers(FIRST_TOKEN, vocab_size, length)

    return Work(
        [tokens(n) for n in prompt_P.tolist()],
        [[tokens(n) for n in lengths] for lengths in response_PN.tolist()],
        rng.normal(size=response_PN.shape).tolist(),
    )


def write_model(folder: Path, config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def join_alone() -> None:
    """This process becomes a fleet of one rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    initialize_parallel(ParallelConfig())


def build_sides(folder: Path) -> Mapping[str, Update]:
    return {side: _build(side, folder) for side in SIDES}


def _build(side: str, folder: Path) -> Update:
    return _plain_loop(folder) if side == PLAIN else _learner(folder, side)


def _plain_loop(folder: Path) -> Update:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.learning_rate, fused=True)

    def update(work: Work) -> None:
        ids_NT, mask_NT, is_response_NT = _pad(work)
        logits_NTV = model(input_ids=ids_NT, attention_mask=mask_NT).logits[:, :-1]
        logprobs_NT = torch.log_softmax(logits_NTV, -1).gather(-1, ids_NT[:, 1:, None])[..., 0]
        ratio_NT = (logprobs_NT - logprobs_NT.detach()).exp()
        advantages_N1 = torch.tensor([[advantage] for _, _, advantage in work.rows])
        clipped_NT = ratio_NT.clamp(1 - CLIP, 1 + CLIP)
        loss_NT = torch.maximum(-advantages_N1 * ratio_NT, -advantages_N1 * clipped_NT)
        loss = (loss_NT * is_response_NT[:, 1:]).sum() / work.num_response_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _pad(work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and response mask, each [N, T]; padding on the right."""
    rows = work.rows
    shape = len(rows), work.num_padded_tokens // len(rows)
    ids_NT, mask_NT, is_response_NT = (
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, bool),
    )
    for n, (prompt, response, _) in enumerate(rows):
        end = len(prompt) + len(response)
        ids_NT[n, :end] = np.concatenate([prompt, response])
        mask_NT[n, :end] = 1
        is_response_NT[n, len(prompt) : end] = True
    return torch.from_numpy(ids_NT), torch.from_numpy(mask_NT), torch.from_numpy(is_response_NT)


def build_learner(
    folder: Path, attention: str, settings: ModelSettings = PLAIN_SETTINGS, budget: Budget = BUDGET
) -> Learner:
    with cpu_compat.apply():
        model = load_model(folder, read_spec(folder), settings)
        forward = Forward(model, budget, BACKENDS[attention], temperature=1.0)
        objective = PolicyObjective(forward, PolicySettings(partial(ppo_clip, clip_low=CLIP, clip_high=CLIP)))
        return Learner("actor", forward, {PolicyBatch: objective}, OPTIMIZER)


def _learner(folder: Path, attention: str) -> Update:
    trainer = build_learner(folder, attention)
    steps = iter(range(1_000_000))

    def update(work: Work) -> None:
        key = StepKey("benchmark", next(steps), 0, "actor")
        trainer.forward_backward(key, to_batch(work))
        trainer.optim_step(key, OPTIMIZER.learning_rate)

    return update


def to_batch(work: Work) -> PolicyBatch:
    """Each prompt once, then its samples."""
    tokens: list[Int] = []
    parents, groups, samples, weights, advantages = [], [], [], [], []
    sample = 0
    for group, (prompt, responses) in enumerate(zip(work.prompts, work.responses, strict=True)):
        root = len(tokens)
        tokens += [prompt, *responses]
        parents += [-1, *[root] * len(responses)]
        groups += [group] * (1 + len(responses))
        samples += [-1, *range(sample, sample + len(responses))]
        weights += [0.0, *[1 / work.num_response_tokens] * len(responses)]
        advantages += [0.0, *work.advantages[group]]
        sample += len(responses)
    lengths = [len(part) for part in tokens]
    segments = Segments(
        np.concatenate(tokens).astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array(parents, np.int32),
        np.array(groups, np.int32),
    )
    return PolicyBatch(
        segments,
        samples=np.repeat(np.array(samples, np.int32), lengths),
        loss_weights=np.repeat(np.array(weights, np.float32), lengths),
        advantages=np.repeat(np.array(advantages, np.float32), lengths),
        rollout_logprobs=np.zeros(sum(lengths), np.float32),
        old_logprobs=None,
        ref_logprobs=None,
    )


def _peak_of(side: str, folder: Path) -> float:
    """MiB that two updates of the long-tailed work take above the loaded weights."""
    torch.set_num_threads(1)
    join_alone()
    update, work = _build(side, folder), long_tailed_work(np.random.default_rng(0))
    before = resident_mib()
    for _ in range(2):  # the second has the optimizer's state beside its activations
        update(work)
    return peak_mib() - before


if __name__ == "__main__":
    print(json.dumps(_peak_of(sys.argv[1], Path(sys.argv[2]))))
