"""Rules between training settings: schedules, adapters."""

from collections.abc import Callable

from atoll.config.schema import RunConfig


def _schedules_fit_the_run(config: RunConfig) -> str | None:
    steps = config.run.steps
    for name, section in (
        ("trainer", config.trainer),
        ("critic", config.critic),
        ("cost_critic", config.cost_critic),
    ):
        if section is None:
            continue
        optimizer, table = section.optimizer, f"{name}.optimizer"
        if optimizer.schedule == "constant":
            if optimizer.decay_steps or optimizer.min_learning_rate_share:
                return (
                    f'{table}.schedule = "constant" never decays: remove decay_steps and '
                    'min_learning_rate_share, or set schedule to "cosine" or "wsd"'
                )
            continue
        if optimizer.schedule == "wsd" and optimizer.decay_steps is None:
            return f'{table}.schedule = "wsd" needs decay_steps: set it'
        decay = optimizer.decay_steps or 1
        if optimizer.warmup_steps + decay > steps:
            return (
                f"{table}: {optimizer.warmup_steps} steps of warm-up and "
                f"{optimizer.decay_steps or 'at least 1'} of decay are more than run.steps = {steps}: "
                "lower warmup_steps or decay_steps, or raise run.steps"
            )
    return None


def _adapters_are_the_actors(config: RunConfig) -> str | None:
    for role, section in (("critic", config.critic), ("cost_critic", config.cost_critic)):
        if section is not None and section.lora is not None:
            return (
                f"{role}.lora: a critic is trained in full, since its value head starts at 0: remove the "
                "table"
                "; only the actor supports [trainer.lora]"
            )
        if section is not None and section.router_replay:
            return f"{role}.router_replay: rollout chooses experts for the actor alone: remove it"
    return None


def _routes_are_recorded(config: RunConfig) -> str | None:
    if not config.trainer.router_replay:
        return None
    if config.run.mode not in ("train", "rollout_only"):
        return (
            "trainer.router_replay records the experts of generated tokens, but "
            f'run.mode = "{config.run.mode}" generates none: remove it; experts in dumps are replayed anyway'
        )
    if config.rollout.engine == "sglang" and config.rollout.device == "cpu":
        return (
            "trainer.router_replay: SGLang records experts on GPUs alone: remove it, or set "
            'rollout.engine = "local"'
        )
    return None


def _recomputation_is_for_what_learns(config: RunConfig) -> str | None:
    for role, section in config.roles.items():
        if role not in config.trained and section.recompute != "none":
            return (
                f'{role}.recompute = "{section.recompute}" reduces the memory of a backward pass, and a '
                f"{role} has none: remove it; {role}.max_tokens_per_forward bounds its memory"
            )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _schedules_fit_the_run,
    _adapters_are_the_actors,
    _routes_are_recorded,
    _recomputation_is_for_what_learns,
)
