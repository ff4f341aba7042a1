"""Rules between datasets, agents and the gateway. See rules.py."""

import difflib
from collections.abc import Callable

from atoll.config.mode_rules import is_changed
from atoll.config.schema import RunConfig


def _agents_have_names_of_their_own(config: RunConfig) -> str | None:
    names = [agent.name for agent in config.agents]
    for name in names:
        if names.count(name) > 1:
            return f'[[agents]]: "{name}" is the name of two agents: rename one'
    return None


def _datasets_name_agents(config: RunConfig) -> str | None:
    names = [agent.name for agent in config.agents]
    tables = [("data.train", source.agent) for source in config.data.train]
    tables += [("validation.sets", entry.agent) for entry in config.validation.sets]
    for table, name in tables:
        if name and name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = f"Known: {', '.join(names)}" if names else f'Add an [[agents]] table with name = "{name}"'
            return f'[[{table}]]: agent = "{name}": there is no such agent; {hint}{known}'
    return None


def _agents_get_rows(config: RunConfig) -> str | None:
    named = {dataset.agent for dataset in config.datasets}
    for agent in config.agents:
        if agent.name not in named:
            return (
                f'[[agents]]: no dataset has agent = "{agent.name}": set it in a [[data.train]] or '
                "[[validation.sets]] table, or remove the agent"
            )
    return None


def _the_gateway_has_agents(config: RunConfig) -> str | None:
    if is_changed(config, "gateway") and not config.has_agents:
        return '[gateway] serves agents: set agent = "NAME" in a [[data.train]] table, or remove this one'
    return None


def _instances_have_ports(config: RunConfig) -> str | None:
    gateway = config.gateway
    if gateway.port and gateway.port + gateway.instances - 1 > 65535:
        return (
            f"gateway.port = {gateway.port} with gateway.instances = {gateway.instances}: the last one would "
            "listen above port 65535: lower port"
        )
    return None


def _answers_have_no_agent(config: RunConfig) -> str | None:
    """Rows with their answers are learned as they are."""
    if config.warmup.source is not None and config.warmup.source.agent:
        return "[warmup.source] learns from the answers of its rows, without an agent: remove agent"
    if config.run.mode == "supervised" and config.has_agents:
        return 'run.mode = "supervised" learns from the answers of its rows, without an agent: remove agent'
    return None


def _agents_are_not_greedy_baselines(config: RunConfig) -> str | None:
    if config.coordinator.greedy_baseline and any(source.agent for source in config.data.train):
        return (
            "coordinator.greedy_baseline compares samples with one greedy response, which a multi-turn "
            'session does not have: remove it and use another algorithm.advantage such as "rloo", or '
            "remove agent from [[data.train]]"
        )
    return None


def _rewards_of_sessions_are_the_whole_score(config: RunConfig) -> str | None:
    """A session's reward has no components."""
    own = [agent.name for agent in config.agents if agent.reward == "session"]
    if not own:
        return None
    algorithm = config.algorithm
    advantage, constraint, filter = algorithm.advantage, algorithm.constraint, algorithm.filter
    where = f'[[agents]]: {own[0]} has reward = "session"'
    if advantage.has("reads_components"):
        return (
            f'{where}, and algorithm.advantage = "{advantage.name}" combines reward.graders individually: '
            'set reward = "graders", or use another advantage such as "grpo"'
        )
    if constraint is not None and constraint.cost is not None:
        return (
            f"{where}, and algorithm.constraint.cost = {constraint.cost!r} comes from reward.graders: set "
            'reward = "graders", or use a [cost_model]'
        )
    if filter is not None and filter.name == "scores_differ" and filter.parameters.get("component"):
        component = filter.parameters["component"]
        return (
            f"{where}, and algorithm.filter compares component = {component!r} of reward.graders: remove "
            'component, which compares whole rewards, or set reward = "graders"'
        )
    return None


def _graders_have_samples(config: RunConfig) -> str | None:
    reward = config.reward
    if config.has_agents and not config.asks_graders and is_changed(reward, "graders") and reward.graders:
        return (
            'reward.graders score nothing, since the agents of all datasets have reward = "session": remove '
            'reward.graders, or set reward = "graders"'
        )
    return None


def _functions_have_a_sandbox(config: RunConfig) -> str | None:
    for agent in config.agents:
        if agent.tools and agent.tools.functions and config.reward.sandbox is None:
            return (
                f"[[agents]]: {agent.name} has tools.functions, which run in the sandbox: add a "
                "[reward.sandbox] table (it may be empty)"
            )
    return None


def _weights_are_of_graders(config: RunConfig) -> str | None:
    for agent in config.agents:
        if agent.reward_weight != 1.0 and agent.reward == "session":
            return (
                f"[[agents]]: {agent.name}: reward_weight = {agent.reward_weight:g} weighs a session's own "
                'rewards against reward.graders: set reward = "both", or remove it'
            )
    return None


def _files_are_of_sessions(config: RunConfig) -> str | None:
    named = [grader for grader in config.reward.graders if grader.file]
    if named and not config.has_agents:
        return (
            f'reward.graders: {named[0].name}: file = "{named[0].file}" is in an agent\'s workspace, and no '
            'dataset has an agent: remove file, or set agent = "NAME" in a [[data.train]] table'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _agents_have_names_of_their_own,
    _datasets_name_agents,
    _agents_get_rows,
    _the_gateway_has_agents,
    _instances_have_ports,
    _answers_have_no_agent,
    _agents_are_not_greedy_baselines,
    _rewards_of_sessions_are_the_whole_score,
    _graders_have_samples,
    _functions_have_a_sandbox,
    _weights_are_of_graders,
    _files_are_of_sessions,
)
