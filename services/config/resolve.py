"""Resolves every "auto" of device, dtype, transport and placement, once, when a run is launched. Pure."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from atoll.config.errors import ConfigError
from atoll.config.gpus import describe_gpus, parse_gpus
from atoll.config.placement import MODES, GpuNeeds, lay_out, mode_of
from atoll.config.rules import violations
from atoll.config.schema import GpusConfig, PlacementMode, RunConfig, section_name

AUTO = "auto"
ROLE_TABLES = ("trainer", "critic", "cost_critic", "reference", "reward_model", "cost_model")


def resolve(config: RunConfig, there: Sequence[int], host: str = "") -> RunConfig:
    """`config` without "auto", and with the GPUs of every rank. Resolving twice changes nothing.

    `there`: the GPUs of this machine, by their index in nvidia-smi; with `use_visible_gpus`, they do not
    count. `host`: its name. Raises ConfigError if the run does not fit on them, or a rule forbids what "auto"
    became.
    """
    named = _with_this_host_unnamed(config.placement.gpus, host)
    is_named = bool(named.roles or named.replicas)
    uses_visible, mode = config.placement.use_visible_gpus, config.placement.mode
    has_gpus = is_named or uses_visible or (bool(there) and not config.generates_on_cpu)
    config = _with_devices(config, has_gpus=has_gpus)
    if uses_visible:
        return _placed(config, MODES[0] if mode == AUTO else mode, named)
    needs = gpu_needs(config)
    if is_named:
        _check_named(config, named, needs, there)
        return _placed(config, mode_of(named) if mode == AUTO else mode, named)
    modes = MODES if mode == AUTO else (mode,)
    fitting = [mode for mode in modes if needs.total(mode) <= len(there)]
    if not fitting:
        raise ConfigError(_does_not_fit(modes, needs, len(there)))
    try:
        return _placed(config, fitting[0], lay_out(needs, there, fitting[0]))
    except ConfigError as error:
        if fitting == ["colocated"] and len(modes) > 1:
            raise ConfigError(
                f"{_does_not_fit(modes[:-1], needs, len(there))}; or colocate: {error}"
            ) from None
        raise


def resolve_for_gpus(config: RunConfig, count: int | None) -> RunConfig:
    """As `resolve`, for a machine with `count` GPUs, or as many as the file names; None: enough for models
    that share theirs."""
    gpus, mode = config.placement.gpus, config.placement.mode
    config = _with_devices(config, has_gpus=True)
    named = {gpu.number for each in (*gpus.roles.values(), *gpus.replicas) for gpu in each if not gpu.host}
    if count is None:
        count = max(gpu_needs(config).total("split" if mode == AUTO else mode), 1)
    return resolve(config, sorted(named) or range(count))


def may_use_gpus(config: RunConfig) -> bool:
    """Whether the run depends on this machine's GPUs."""
    if config.placement.use_visible_gpus:
        return False
    if config.placement.gpus != GpusConfig():
        return True
    devices = [config.roles[role].device for role in config.started_roles]
    if config.num_replicas and config.rollout.engine == "sglang":
        devices.append(config.rollout.device)
    unused = ("cpu", AUTO) if config.generates_on_cpu else ("cpu",)
    return any(device not in unused for device in devices)


def asks_for_gpus(config: RunConfig) -> bool:
    """Whether the config itself says that the run has GPUs: by a device, or by their numbers."""
    devices = [config.roles[role].device for role in config.started_roles]
    if config.num_replicas:
        devices.append(config.rollout.device)
    return config.placement.gpus != GpusConfig() or "cuda" in devices


def gpu_needs(config: RunConfig) -> GpuNeeds:
    """Of a config whose devices are resolved."""
    sections = {role: config.roles[role] for role in config.started_roles}
    return GpuNeeds(
        {role: each.parallel.world_size for role, each in sections.items() if each.device == "cuda"},
        config.num_replicas if config.rollout.device == "cuda" else 0,
        config.rollout.tp_size,
    )


def _with_devices(config: RunConfig, *, has_gpus: bool) -> RunConfig:
    tree = config.model_dump(mode="json")
    for table in (*(tree[name] for name in ROLE_TABLES if tree[name]), tree["rollout"]):
        if table["device"] == AUTO:
            table["device"] = "cuda" if has_gpus and table.get("engine") != "local" else "cpu"
        if table["dtype"] == AUTO:
            table["dtype"] = "bfloat16" if table["device"] == "cuda" else "float32"
    return RunConfig.model_validate(tree)


def _placed(config: RunConfig, mode: PlacementMode, gpus: GpusConfig) -> RunConfig:
    """Models that share GPUs are off-loaded while others compute."""
    tree = config.model_dump(mode="json")
    tree["placement"] |= {"mode": mode, "gpus": gpus.model_dump(mode="json")}
    if config.weights.transport == AUTO:
        tree["weights"]["transport"] = _transport(config, mode, gpus)
    uses_visible = config.placement.use_visible_gpus
    users = Counter(gpu for each in (*gpus.roles.values(), *gpus.replicas) for gpu in each)
    shares_visible = uses_visible and mode == "split" and len(config.started_roles) > 1
    for role in config.roles:
        held = gpus.roles.get(role if role in config.started_roles else "actor", ())
        if mode == "colocated" or shares_visible or any(users[gpu] > 1 for gpu in held):
            tree[section_name(role)]["offload"] = True
    placed = RunConfig.model_validate(tree)
    if sentences := violations(placed, is_resolved=True):
        raise ConfigError("\n".join(sentences))
    return placed


def _transport(config: RunConfig, mode: PlacementMode, gpus: GpusConfig) -> str:
    hosts = {gpu.host for each in (gpus.roles.get("actor", ()), *gpus.replicas) for gpu in each} or {""}
    if "cpu" in (config.trainer.device, config.rollout.device) or config.run.mode != "train":
        return "shm" if hosts == {""} and not config.placement.use_visible_gpus else "tcp"
    if mode == "colocated":
        return "cuda_ipc" if len(hosts) == 1 else "tcp"
    return "nccl"


def _with_this_host_unnamed(gpus: GpusConfig, host: str) -> GpusConfig:
    def here(text: str) -> str:
        short = host.partition(".")[0]
        return describe_gpus(
            gpu._replace(host="") if gpu.host in (host, short) else gpu for gpu in parse_gpus(text)
        )

    tree: dict[str, Any] = gpus.model_dump()
    rollout = tuple(map(here, tree.pop("rollout")))
    return GpusConfig(rollout=rollout, **{role: here(text) for role, text in tree.items()})


def _check_named(config: RunConfig, named: GpusConfig, needs: GpuNeeds, there: Sequence[int]) -> None:
    """Raises ConfigError if [placement.gpus] does not have what the run needs, or asks for what it lacks."""
    for role in dict.fromkeys((*needs.roles, *named.roles)):
        size, gpus = needs.roles.get(role, 0), named.roles.get(role, ())
        if len(gpus) != size:
            raise ConfigError(
                f"placement.gpus.{role} names {len(gpus)} GPUs, expected {size}, one for each rank that "
                f"computes on one: change it, {section_name(role)}.parallel or {section_name(role)}.device"
            )
    if len(named.replicas) != needs.replicas or any(len(gpus) != needs.tp_size for gpus in named.replicas):
        raise ConfigError(
            f"placement.gpus.rollout = {list(named.rollout)}, expected {needs.replicas} entries of "
            f"{needs.tp_size}: one entry per replica, with rollout.sglang.tp_size GPUs"
        )
    for replica in named.replicas:
        if len({gpu.host for gpu in replica}) > 1:
            raise ConfigError(
                f"placement.gpus.rollout: {describe_gpus(replica)} are on several hosts, a replica is on one"
            )
    for one, other in combinations(named.replicas, 2):
        if shared := set(one) & set(other):
            raise ConfigError(
                f"placement.gpus.rollout: two replicas have GPU {describe_gpus(shared)}: name it once"
            )
    for gpu in (gpu for each in (*named.roles.values(), *named.replicas) for gpu in each):
        if not gpu.host and gpu.number not in there:
            found = ", ".join(map(str, there)) or "none"
            raise ConfigError(
                f"placement.gpus names GPU {gpu.number}, but this machine has {found}: see nvidia-smi and "
                "CUDA_VISIBLE_DEVICES"
            )
    mode, found_mode = config.placement.mode, mode_of(named)
    is_apart = mode == "colocated" != found_mode and needs.roles and needs.replicas
    if mode != AUTO and (MODES.index(found_mode) > MODES.index(mode) or is_apart):
        raise ConfigError(
            f'placement.mode = "{mode}", but the GPUs in placement.gpus are those of "{found_mode}": change '
            "one of them"
        )


def _does_not_fit(modes: Sequence[PlacementMode], needs: GpuNeeds, count: int) -> str:
    asked = ", ".join(f'{needs.total(mode)} with placement.mode = "{mode}"' for mode in modes)
    sizes = {f"{section_name(role)}.parallel": size for role, size in needs.roles.items()}
    sizes["rollout.replicas"] = needs.replicas * needs.tp_size
    advice = f"lower {max(sizes, key=sizes.__getitem__)}"
    others = [mode for mode in MODES if mode not in modes and needs.total(mode) <= count]
    if not count:
        advice = 'set device = "cpu" in the tables of roles and rollout'
    elif len(modes) == 1 and others:
        advice = f'set placement.mode = "{others[0]}"'
    return (
        f"the run ({needs}) needs this many GPUs: {asked}; this machine has {count}: {advice}, or name GPUs "
        "of several hosts in [placement.gpus]"
    )
