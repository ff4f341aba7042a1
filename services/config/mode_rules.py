"""Settings that a run.mode ignores, and settings disabled by others. See rules.py."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import BaseModel

from atoll.config.schema import RunConfig

_OTHER_MODELS = ("cost_critic", "cost_model", "critic", "reference", "reward_model")

# Settings of replicas, generation and grading
_GENERATION = (
    "agents",
    "coordinator.max_dropped_share",
    "coordinator.max_sample_attempts",
    "coordinator.max_staleness",
    "coordinator.on_age",
    "coordinator.partial_rollouts",
    "coordinator.sample_timeout_s",
    "coordinator.samples_per_prompt",
    "data.max_prompt_tokens",
    "gateway",
    "servers",
    "weights",
)


class Unread(NamedTuple):
    because: str  # reason
    settings: tuple[str, ...]  # tables, or TABLE.KEY


UNREAD: Mapping[str, Unread] = {
    "train": Unread("generates what it trains on", ("data.replay",)),
    "supervised": Unread(
        "learns from the answers in data.train, without rollout, reward and other models",
        (
            *_GENERATION,
            *_OTHER_MODELS,
            "algorithm",
            "console",
            "coordinator.dump",
            "coordinator.greedy_baseline",
            "data.replay",
            "guards.max_logprob_diff",
            "guards.max_ppo_kl",
            "guards.reward_drop",
            "reward",
            "rollout",
            "run.target_reward",
            "tracking.samples",
            "tracking.every",
            "warmup",
        ),
    ),
    "train_only": Unread(
        "trains on the dumped batches of data.replay, as they were generated, graded and filtered",
        (
            *_GENERATION,
            "algorithm.filter",
            "data.overlong_prompts",
            "data.shuffle",
            "data.train",
            "reward.max_queued",
            "reward.max_restarts",
            "reward.retries",
            "reward.sandbox",
            "reward.services",
            "rollout.dtype",
            "rollout.engine",
            "rollout.local",
            "rollout.max_restarts",
            "rollout.python",
            "rollout.replicas",
            "rollout.sglang",
            "rollout.threads",
            "validation",
        ),
    ),
    "rollout_only": Unread(
        "generates and grades, and trains nothing",
        (
            *_OTHER_MODELS,
            "algorithm.advantage",
            "algorithm.aggregation",
            "algorithm.constraint",
            "algorithm.correction",
            "algorithm.entropy_coef",
            "algorithm.kl",
            "algorithm.loss",
            "algorithm.num_epochs",
            "algorithm.num_minibatches",
            "algorithm.old_logprobs",
            "algorithm.reweight",
            "checkpoint",
            "coordinator.on_age",
            "coordinator.partial_rollouts",
            "data.replay",
            "guards.max_entropy",
            "guards.max_logprob_diff",
            "guards.max_ppo_kl",
            "guards.min_entropy",
            "trainer",
            "validation.best",
            "warmup",
            "weights",
        ),
    ),
}


def is_changed(section: BaseModel, path: str) -> bool:
    """Whether a setting below `section` differs from its default."""
    *tables, name = path.split(".")
    for table in tables:
        section = getattr(section, table)
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _the_mode_reads_it(config: RunConfig) -> str | None:
    unread = UNREAD[config.run.mode]
    changed = [path for path in unread.settings if is_changed(config, path)]
    if changed:
        return f'run.mode = "{config.run.mode}" {unread.because}: remove {", ".join(sorted(changed))}'
    return None


def _roles_are_learned(config: RunConfig) -> str | None:
    if config.run.mode == "supervised":
        return None
    for table, entries in (("data.train", config.data.train), ("validation.sets", config.validation.sets)):
        if any(is_changed(entry, "learn") for entry in entries):
            return (
                f"[[{table}]]: learn chooses what is learned of rows with answers, and these are prompts: "
                'remove it, or set run.mode = "supervised"'
            )
    return None


def _models_are_asked(config: RunConfig) -> str | None:
    """Only models that the recipe uses may be configured; see RunConfig.roles."""
    advantage = config.algorithm.advantage.name
    if config.critic is not None and "critic" not in config.roles:
        return (
            f'[critic]: algorithm.advantage = "{advantage}" does not use a critic: remove the table, or use '
            '"gae"'
        )
    if config.cost_critic is not None and "cost_critic" not in config.roles:
        has = "an" if config.algorithm.constraint else "no"
        return (
            "[cost_critic] estimates the cost of an [algorithm.constraint] for an advantage from values, "
            f'such as "gae"; this run has {has} [algorithm.constraint] and "{advantage}": remove the table'
        )
    if is_changed(config, "reference") and config.algorithm.kl is None:
        return "[reference] is used only by [algorithm.kl]: add that table, or remove this one"
    return None


def _switches_are_on(config: RunConfig) -> str | None:
    """Settings of a feature that another setting disables."""
    kl, coordinator = config.algorithm.kl, config.coordinator
    if coordinator.partial_rollouts and coordinator.max_staleness == 0:
        return (
            "coordinator.partial_rollouts continues sequences with newer weights, but with max_staleness = "
            "0 no sequence is running at a push: set coordinator.max_staleness to 1 or more, or remove it"
        )
    if coordinator.on_age != "wait" and coordinator.max_staleness == 0:
        return (
            f'coordinator.on_age = "{coordinator.on_age}" applies to turns older than the trained version, '
            "but with max_staleness = 0 there are none: set coordinator.max_staleness to 1 or more, or "
            "remove it"
        )
    if kl is not None and kl.target is None and is_changed(kl, "horizon"):
        return "algorithm.kl.horizon applies to an adaptive coef: set algorithm.kl.target, or remove it"
    if config.guards.reward_drop is None and is_changed(config.guards, "window"):
        return "guards.window applies to guards.reward_drop: set that, or remove it"
    for table, section, verb in (
        ("console", config.console, "prints"),
        ("tracking", config.tracking, "sends"),
    ):
        if section.samples and coordinator.dump == "none":
            return (
                f"{table}.samples {verb} what coordinator.dump keeps: set coordinator.dump = "
                f'"recent", or remove {table}.samples'
            )
        if section.samples == 0 and is_changed(section, "every"):
            return f"{table}.every applies to {table}.samples: set that, or remove it"
    if config.warmup.steps == 0 and is_changed(config, "warmup"):
        return "[warmup] has steps = 0, which disables the warm-up: set warmup.steps, or remove the table"
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _the_mode_reads_it,
    _roles_are_learned,
    _models_are_asked,
    _switches_are_on,
)
