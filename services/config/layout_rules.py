"""Rules between the parallel layouts of a run; `ModelSpec` checks them against a model."""

from collections.abc import Callable

from atoll.config.schema import ParallelConfig, RunConfig


def _each_layout_is_one(config: RunConfig) -> str | None:
    for role, section in config.roles.items():
        table = f"{'trainer' if role == 'actor' else role}.parallel"
        if sentence := _broken(section.parallel, table):
            return sentence
    return None


def _broken(parallel: ParallelConfig, table: str) -> str | None:
    tensor, expert = parallel.tensor, parallel.expert
    if parallel.sequence and tensor == 1:
        return (
            f"{table}.sequence splits tokens over tensor-parallel ranks, but tensor = 1: set tensor above 1, "
            "or remove it"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        return (
            f"{table}.virtual_pipeline = {parallel.virtual_pipeline} needs pipeline stages, but pipeline = "
            "1: set pipeline above 1, or remove it"
        )
    if tensor * parallel.context * parallel.data % expert:
        return (
            f"{table}.expert = {expert} does not divide tensor x context x data = {tensor} x "
            f"{parallel.context} x {parallel.data}, the ranks of a stage, which share its experts: choose a "
            "divisor"
        )
    if expert > 1 and tensor > 1 and not parallel.sequence:
        return (
            f"{table}: with expert = {expert}, each of tensor = {tensor} ranks would send the same tokens to "
            "the experts: set sequence = true"
        )
    return None


def _full_kl_has_one_stage(config: RunConfig) -> str | None:
    kl, pipeline = config.algorithm.kl, config.trainer.parallel.pipeline
    if kl and kl.estimator == "full" and pipeline > 1:
        return (
            'algorithm.kl.estimator = "full" runs the reference in the last stage of the actor\'s forward '
            f'pass: set trainer.parallel.pipeline = {pipeline} to 1, or use estimator "k3"'
        )
    return None


def _colocated_reference_lies_as_the_actor(config: RunConfig) -> str | None:
    reference, actor = config.reference, config.trainer.parallel
    is_its_own = reference.parallel not in (actor, type(actor)())
    if "reference" in config.roles and reference.placement == "colocated" and is_its_own:
        return (
            'reference.placement = "colocated" uses the actor\'s ranks and layout: remove reference.parallel'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _each_layout_is_one,
    _full_kl_has_one_stage,
    _colocated_reference_lies_as_the_actor,
)
