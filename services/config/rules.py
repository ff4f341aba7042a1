"""Rules between settings of different tables: each returns what is wrong, or None. load.py applies them."""

from collections.abc import Callable

from atoll.config import (
    agent_rules,
    algorithm_rules,
    colocation_rules,
    functions,
    layout_rules,
    mode_rules,
    placement_rules,
    rollout_rules,
    training_rules,
    validation_rules,
    weight_rules,
)
from atoll.config.schema import MAX_SAMPLES, RunConfig


def violations(config: RunConfig, *, is_resolved: bool = False) -> list[str]:
    """One sentence per violated rule. `is_resolved`: "auto" has been replaced, also in tables that the run's
    mode does not read; rules about those hold for what a user wrote."""
    rules = (rule for rule in RULES if not (is_resolved and rule in mode_rules.RULES))
    return [sentence for rule in rules if (sentence := rule(config)) is not None]


def _replay_has_batches(config: RunConfig) -> str | None:
    if config.run.mode == "train_only" and config.data.replay is None:
        return 'run.mode = "train_only" starts no rollout service: set data.replay to a dump folder'
    return None


def _prompts_come_from_somewhere(config: RunConfig) -> str | None:
    if config.run.mode != "train_only" and not config.data.train:
        return "no training data: add a [[data.train]] table with a path"
    return None


def _groups_have_samples_to_compare(config: RunConfig) -> str | None:
    advantage = config.algorithm.advantage
    if advantage.has("group_relative") and config.coordinator.samples_per_prompt == 1:
        return (
            f'algorithm.advantage = "{advantage.name}" compares the samples of a prompt: '
            "set coordinator.samples_per_prompt to 2 or more"
        )
    return None


def _steps_have_a_size_that_the_store_takes(config: RunConfig) -> str | None:
    """A step's samples are consumed by one transaction of a few seconds, before which all others wait."""
    coordinator = config.coordinator
    samples = coordinator.prompts_per_step * coordinator.samples_per_prompt
    if config.run.mode in ("train", "rollout_only") and samples > MAX_SAMPLES:
        return (
            f"coordinator.prompts_per_step = {coordinator.prompts_per_step} with samples_per_prompt = "
            f"{coordinator.samples_per_prompt} are {samples} samples per step, expected at most "
            f"{MAX_SAMPLES}: lower one of them"
        )
    return None


def _minibatches_have_groups(config: RunConfig) -> str | None:
    num_minibatches, num_groups = config.algorithm.num_minibatches, config.coordinator.prompts_per_step
    if num_groups < num_minibatches:
        return (
            f"algorithm.num_minibatches = {num_minibatches} is more than the {num_groups} groups of a step: "
            "set it to coordinator.prompts_per_step or less"
        )
    return None


def _baseline_is_generated(config: RunConfig) -> str | None:
    advantage = config.algorithm.advantage
    if advantage.has("needs_baseline") and not config.coordinator.greedy_baseline:
        return (
            f'algorithm.advantage = "{advantage.name}" compares each sample with a greedy one of the same '
            "prompt: set coordinator.greedy_baseline = true"
        )
    return None


def _baseline_is_scored_alike(config: RunConfig) -> str | None:
    advantage = config.algorithm.advantage
    other = "[reward_model]" if config.reward_model else "[algorithm.constraint]"
    if advantage.has("needs_baseline") and (config.reward_model or config.algorithm.constraint):
        return (
            f'algorithm.advantage = "{advantage.name}" scores greedy samples by reward.graders only, '
            f'without {other}: remove that, or use another advantage such as "rloo"'
        )
    return None


def _components_are_the_whole_score(config: RunConfig) -> str | None:
    advantage = config.algorithm.advantage
    kl_in_reward = config.algorithm.kl is not None and config.algorithm.kl.where == "reward"
    other = "[reward_model]" if config.reward_model else 'algorithm.kl.where = "reward"'
    if advantage.has("reads_components") and (config.reward_model or kl_in_reward):
        return (
            f'algorithm.advantage = "{advantage.name}" combines reward.graders individually and would '
            f"ignore {other}: remove that (a KL penalty can go into the loss), or use another advantage "
            'such as "grpo"'
        )
    return None


def _baseline_is_used(config: RunConfig) -> str | None:
    advantage = config.algorithm.advantage
    if config.coordinator.greedy_baseline and not (advantage.has("needs_baseline") or advantage.is_users_own):
        return (
            f'coordinator.greedy_baseline generates a sample per prompt that "{advantage.name}" ignores: '
            'remove it, or set algorithm.advantage = "remax"'
        )
    return None


def _values_have_a_critic(config: RunConfig) -> str | None:
    if config.algorithm.advantage.has("needs_values") and config.critic is None:
        return (
            f'algorithm.advantage = "{config.algorithm.advantage.name}" needs a value model: add a [critic] '
            "table"
        )
    return None


def _cost_values_have_a_critic(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    needs_values = algorithm.advantage.has("needs_values")
    if needs_values and algorithm.constraint and config.cost_critic is None:
        return (
            "[algorithm.constraint] estimates the cost's advantage as that of the reward, by "
            f'"{algorithm.advantage.name}", which needs values of the cost: add a [cost_critic] table'
        )
    return None


def _constraint_has_a_cost(config: RunConfig) -> str | None:
    constraint = config.algorithm.constraint
    if constraint is None:
        return None
    graders = [grader.name for grader in config.reward.graders]
    if constraint.cost is None and config.cost_model is None:
        return (
            "[algorithm.constraint] needs a cost: set cost to one of reward.graders "
            f"({', '.join(graders) or 'none'}), or add a [cost_model] table"
        )
    if constraint.cost is not None and constraint.cost not in graders:
        return (
            f"algorithm.constraint.cost = {constraint.cost!r} is not among reward.graders ("
            f"{', '.join(graders) or 'none'}): add it there, with weight = 0 if it is not a reward"
        )
    return None


def _cost_model_is_used(config: RunConfig) -> str | None:
    constraint = config.algorithm.constraint
    if config.cost_model is not None and (constraint is None or constraint.cost is not None):
        return (
            "[cost_model] is used only by an [algorithm.constraint] without cost: add that table, or remove "
            "[cost_model]"
        )
    return None


def _something_scores(config: RunConfig) -> str | None:
    if config.asks_graders and not config.reward.graders and config.reward_model is None:
        return "nothing scores responses: name a function in reward.graders, or add a [reward_model] table"
    return None


def _code_has_limits_that_can_be_kept(config: RunConfig) -> str | None:
    for grader in config.reward.graders:
        if grader.name != "code":
            continue
        limits = functions.with_defaults(functions.GRADER, "code", grader.parameters)
        case_s, all_s, memory_mb = limits["case_timeout_s"], limits["timeout_s"], limits["memory_mb"]
        if case_s + all_s > grader.deadline_s:
            return (
                "reward.graders: code: a hanging program must end before the response's deadline: set "
                f"deadline_s = {grader.deadline_s} to timeout_s + case_timeout_s = {all_s + case_s} or more"
            )
        sandbox = config.reward.sandbox
        if sandbox is not None and memory_mb > sandbox.memory_mb:
            return (
                f"reward.graders: code: memory_mb = {memory_mb} exceeds the limit of a program: set it to "
                f"reward.sandbox.memory_mb = {sandbox.memory_mb} or less"
            )
    return None


def _graders_have_names_of_their_own(config: RunConfig) -> str | None:
    names = [grader.name for grader in config.reward.graders]
    if len(set(names)) < len(names):
        return (
            f"reward.graders: {', '.join(names)}: components are identified by name: list each function once"
        )
    return None


def _servers_are_asked(config: RunConfig) -> str | None:
    asked = config.reward.servers
    for server in config.servers:
        if server.kind == "reward" and server.name not in asked:
            graders = ", ".join(f"server:{name}" for name in asked) or "no server:NAME"
            return (
                f"[[servers]]: no grader uses the reward server {server.name}: reward.graders has {graders}: "
                f'add {{ name = "server:{server.name}" }} there, or remove the server'
            )
    return None


def _servers_stand_there_once(config: RunConfig) -> str | None:
    places = [(server.kind, server.name, server.url) for server in config.servers]
    for place in places:
        if places.count(place) > 1:
            return f"[[servers]]: {' '.join(place)} is listed twice: raise its concurrency instead"
    return None


def _filter_sees_the_whole_score(config: RunConfig) -> str | None:
    if config.algorithm.filter and config.reward_model:
        return "algorithm.filter filters groups before [reward_model] has scored them: remove one of the two"
    return None


def _entropy_guard_leaves_room(config: RunConfig) -> str | None:
    low, high = config.guards.min_entropy, config.guards.max_entropy
    if low is not None and high is not None and low >= high:
        return (
            f"guards: every entropy is below min_entropy = {low:g} or above max_entropy = {high:g}: "
            "set the first below the second"
        )
    return None


def _kernels_have_half_precision(config: RunConfig) -> str | None:
    for role, section in config.roles.items():
        if section.attention in ("varlen", "flash") and section.dtype == "float32":
            table = "trainer" if role == "actor" else role
            return (
                f'{table}.attention = "{section.attention}" does not support float32: set '
                f'{table}.dtype = "bfloat16", or remove attention'
            )
    return None


def _warmup_has_rows(config: RunConfig) -> str | None:
    if config.warmup.steps and config.warmup.source is None:
        return "warmup.steps > 0 needs [warmup.source] with a path"
    return None


def _warmup_target_is_measured(config: RunConfig) -> str | None:
    can_measure = config.validation.sets and config.run.mode == "train"
    if config.warmup.target_reward is not None and not can_measure:
        return (
            "warmup.target_reward is measured on the first of [[validation.sets]]: add one, and use "
            'run.mode = "train" (or set only warmup.steps)'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _replay_has_batches,
    _prompts_come_from_somewhere,
    _groups_have_samples_to_compare,
    _steps_have_a_size_that_the_store_takes,
    _minibatches_have_groups,
    _baseline_is_generated,
    _baseline_is_scored_alike,
    _components_are_the_whole_score,
    _baseline_is_used,
    _values_have_a_critic,
    _cost_values_have_a_critic,
    _constraint_has_a_cost,
    _cost_model_is_used,
    _something_scores,
    _code_has_limits_that_can_be_kept,
    _graders_have_names_of_their_own,
    _servers_are_asked,
    _servers_stand_there_once,
    _filter_sees_the_whole_score,
    *algorithm_rules.RULES,
    _entropy_guard_leaves_room,
    _kernels_have_half_precision,
    _warmup_has_rows,
    _warmup_target_is_measured,
    *agent_rules.RULES,
    *mode_rules.RULES,
    *training_rules.RULES,
    *layout_rules.RULES,
    *placement_rules.RULES,
    *rollout_rules.RULES,
    *validation_rules.RULES,
    *weight_rules.RULES,
    *colocation_rules.RULES,
)
