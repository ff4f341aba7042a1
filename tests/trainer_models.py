"""Learners of one rank, without a run's config. Call them after `initialize_parallel`."""

from pathlib import Path

from atoll.config.schema import OptimizerConfig
from atoll.runtime.model_spec import read_spec, with_value_head
from atoll.trainer.losses.loss import ppo_clip
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.forward import Budget, Forward
from atoll.trainer.megatron.hf import load_model
from atoll.trainer.megatron.model import ModelSettings
from atoll.trainer.objective import (
    PolicyObjective,
    PolicySettings,
    SupervisedObjective,
    ValueObjective,
)
from atoll.trainer.step import Learner
from atoll.wire.types import PolicyBatch, SupervisedBatch, ValueBatch

PPO = PolicySettings(ppo_clip)
PLAIN = ModelSettings()


def policy_forward(
    folder: Path,
    max_tokens: int = 60,
    attention: str = "shared_prefix",
    temperature: float = 1.0,
    settings: ModelSettings = PLAIN,
) -> Forward:
    with cpu_compat.apply():
        model = load_model(folder, read_spec(folder), settings)
        return Forward(model, Budget(max_tokens, 2 * max_tokens), BACKENDS[attention], temperature)


def policy_learner(
    forward: Forward,
    optimizer: OptimizerConfig,
    settings: PolicySettings = PPO,
    reference: Forward | None = None,
) -> Learner:
    objectives = {
        PolicyBatch: PolicyObjective(forward, settings, reference),
        SupervisedBatch: SupervisedObjective(forward),
    }
    with cpu_compat.apply():
        return Learner("actor", forward, objectives, optimizer)


def critic_learner(
    folder: Path,
    optimizer: OptimizerConfig,
    clip: float = 0.5,
    max_tokens: int = 60,
    attention: str = "shared_prefix",
    settings: ModelSettings = PLAIN,
) -> Learner:
    with cpu_compat.apply():
        model = load_model(folder, with_value_head(read_spec(folder, ("language", "value"))), settings)
        forward = Forward(model, Budget(max_tokens, 2 * max_tokens), BACKENDS[attention], temperature=1.0)
        return Learner("critic", forward, {ValueBatch: ValueObjective(forward, "critic", clip)}, optimizer)
