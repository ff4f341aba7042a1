"""The models of one trainer service, built by role."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from atoll.config.functions import load
from atoll.config.load import visible_devices
from atoll.config.schema import (
    CriticSection,
    Role,
    RoleSection,
    RunConfig,
    TrainerSection,
    section_name,
)
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import HEADS, check_layout, read_spec, with_value_head
from atoll.trainer.losses.loss import LOSSES, SELECTIONS
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.attention import backend
from atoll.trainer.megatron.forward import Budget, Forward
from atoll.trainer.megatron.hf import load_model
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.objective import (
    Objective,
    PolicyObjective,
    PolicySettings,
    SupervisedObjective,
    ValueObjective,
)
from atoll.trainer.publish import DTYPES
from atoll.trainer.step import Learner
from atoll.wire.types import Batch, PolicyBatch, SupervisedBatch, ValueBatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """The models of this rank; at most the first is trained."""

    forwards: Mapping[Role, Forward]
    learner: Learner | None


def section_of(config: RunConfig, role: Role) -> RoleSection:
    """The settings of the service that holds `role`. Raises UserError if the run has no such service."""
    if role not in config.roles:
        raise UserError(
            f"this run has no {role}: its config needs {', '.join(config.roles)}; "
            "start only those, or change the algorithm"
        )
    if role == "reference" and config.reference.placement == "colocated":
        raise UserError(
            'reference.placement = "colocated": the actor\'s processes hold it, start none for it'
        )
    return config.roles[role]


def longest_silence(config: RunConfig) -> timedelta:
    """After which the coordinator gives up on a trainer, and its ranks on each other."""
    return timedelta(seconds=config.coordinator.request_timeout_s)


def join_ranks(config: RunConfig, role: Role) -> None:
    """Joins the ranks of `role`. Every rank of the service calls it once, before it builds anything."""
    section, table = section_of(config, role), section_name(role)
    if section.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f'{table}.device = "cuda", but PyTorch {torch.__version__} cannot use a GPU '
            f"(CUDA_VISIBLE_DEVICES = {visible_devices()}): `atoll doctor` says what is missing; to compute "
            f'on the CPU, set {table}.device = "cpu"'
        )
    _log.info("computes on %s in %s", section.device, section.dtype)
    torch.set_num_threads(section.threads)
    initialize_parallel(section.parallel, table, longest_silence(config))


def build_roles(config: RunConfig, role: Role) -> Roles:
    """Builds the models of `role`'s service, as they are before their first update."""
    section = section_of(config, role)
    with cpu_compat.apply():
        forward = _forward(config, role, section)
        if isinstance(section, CriticSection):
            return _critic(role, forward, section)
        if isinstance(section, TrainerSection):
            return _actor(config, forward, section)
        return Roles({role: _freeze(forward)}, None)


def _critic(role: Role, forward: Forward, section: CriticSection) -> Roles:
    objective = ValueObjective(forward, role, section.clip)
    return Roles({role: forward}, Learner(role, forward, {ValueBatch: objective}, section.optimizer))


def _actor(config: RunConfig, forward: Forward, section: TrainerSection) -> Roles:
    forwards: dict[Role, Forward] = {"actor": forward}
    if "reference" in config.roles and config.reference.placement == "colocated":
        forwards["reference"] = _freeze(_forward(config, "reference", section))
    algorithm = config.algorithm
    settings = PolicySettings(
        loss=load(algorithm.loss, LOSSES),
        select=load(algorithm.loss, SELECTIONS) if algorithm.loss.name in SELECTIONS else None,
        entropy_coef=algorithm.entropy_coef,
        kl=algorithm.kl if algorithm.kl and algorithm.kl.where == "loss" else None,
    )
    objectives: dict[type[Batch], Objective] = {
        PolicyBatch: PolicyObjective(forward, settings, forwards.get("reference")),
        SupervisedBatch: SupervisedObjective(forward),
    }
    return Roles(forwards, Learner("actor", forward, objectives, section.optimizer))


def _forward(config: RunConfig, role: Role, section: RoleSection) -> Forward:
    folder = config.model_folder(role)
    spec = read_spec(folder, HEADS[role])
    if role in ("critic", "cost_critic"):
        spec = with_value_head(spec)
    check_layout(spec, section.parallel, section_name(role))
    return Forward(
        load_model(folder, spec, _settings(config, role, section)),
        Budget(section.max_tokens_per_microbatch, section.max_tokens_per_forward),
        backend(section.attention, DTYPES[section.dtype]),
        config.rollout.sampling.temperature,
    )


def _settings(config: RunConfig, role: Role, section: RoleSection) -> ModelSettings:
    return ModelSettings(
        DTYPES[section.dtype],
        section.parallel.sequence,
        section.recompute,
        config.trainer.lora if role == "actor" else None,
        config.run.seed,
    )


def _freeze(forward: Forward) -> Forward:
    for parameter in forward.model.parameters:
        parameter.requires_grad_(False)
    return forward
