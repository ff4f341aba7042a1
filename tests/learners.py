"""Learners of one rank, without a run's config. Call them after `initialize_parallel`."""

from pathlib import Path

from services.config.schema import OptimizerConfig
from services.runtime.model_spec import read_spec, with_value_head
from services.trainer import cpu_compat
from services.trainer.forward import Forward
from services.trainer.loss import ppo_clip
from services.trainer.model import build
from services.trainer.objective import PolicyObjective, PolicySettings, SupervisedObjective, ValueObjective
from services.trainer.step import Learner
from services.wire.types import PolicyBatch, SupervisedBatch, ValueBatch

PPO = PolicySettings(ppo_clip)


def policy_forward(
    folder: Path, max_tokens: int = 60, shares_prefix: bool = True, temperature: float = 1.0
) -> Forward:
    with cpu_compat.apply():
        return Forward(build(folder, read_spec(folder)), max_tokens, shares_prefix, temperature)


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
    shares_prefix: bool = True,
) -> Learner:
    with cpu_compat.apply():
        model = build(folder, with_value_head(read_spec(folder, ("language", "value"))))
        forward = Forward(model, max_tokens, shares_prefix, temperature=1.0)
        return Learner("critic", forward, {ValueBatch: ValueObjective(forward, "critic", clip)}, optimizer)
