"""Rules about [validation]. See rules.py."""

from collections.abc import Callable

from atoll.config.mode_rules import is_changed
from atoll.config.schema import RunConfig


def _sets_have_names_of_their_own(config: RunConfig) -> str | None:
    names = [entry.name for entry in config.validation.sets]
    for name in names:
        if names.count(name) > 1:
            return f'[[validation.sets]]: "{name}" is the name of two sets: rename one'
    if "warmup" in names:
        return (
            '[[validation.sets]]: "warmup" is reserved for the metric of warmup.target_reward: rename the set'
        )
    return None


def _supervised_sets_are_not_sampled(config: RunConfig) -> str | None:
    for entry in config.validation.sets if config.run.mode == "supervised" else ():
        if any(is_changed(entry, name) for name in ("num_samples", "pass_score", "sampling")):
            return (
                f'validation set {entry.name}: run.mode = "supervised" measures the loss of the given '
                "answers: remove num_samples, pass_score and sampling"
            )
    return None


def _validation_has_sets(config: RunConfig) -> str | None:
    names = ("every", "at_start", "at_end", "best")
    changed = [f"validation.{name}" for name in names if is_changed(config.validation, name)]
    if changed and not config.validation.sets:
        return f"{', '.join(changed)}: nothing is validated: add [[validation.sets]], or remove that"
    return None


def _best_is_measured(config: RunConfig) -> str | None:
    best, sets = config.validation.best, config.validation.sets
    if config.run.mode == "supervised":
        measured = [f"{entry.name}/nll" for entry in sets]
    else:
        kinds = ("avg", "pass")
        measured = [f"{entry.name}/{kind}@{entry.num_samples}" for entry in sets for kind in kinds]
    if best is not None and sets and best not in measured:
        return (
            f'validation.best = "{best}" is not measured by any set: set it to one of {", ".join(measured)}'
        )
    return None


def _several_samples_differ(config: RunConfig) -> str | None:
    """An agent may be random by itself."""
    for entry in config.validation.sets if config.run.mode != "supervised" else ():
        if entry.num_samples > 1 and entry.sampling.temperature == 0 and not entry.agent:
            return (
                f"validation set {entry.name}: num_samples = {entry.num_samples}, but at temperature 0 all "
                "samples of a prompt are the same: set sampling.temperature = 1.0, or num_samples to 1"
            )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _sets_have_names_of_their_own,
    _supervised_sets_are_not_sampled,
    _validation_has_sets,
    _best_is_measured,
    _several_samples_differ,
)
