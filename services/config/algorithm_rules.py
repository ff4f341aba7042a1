"""Rules about losses, KL penalties and corrections. See rules.py."""

from collections.abc import Callable

from atoll.config.schema import RunConfig


def _full_kl_sees_both_vocabularies(config: RunConfig) -> str | None:
    kl = config.algorithm.kl
    colocated = config.reference.placement == "colocated"
    if kl and kl.estimator == "full" and not (kl.where == "loss" and colocated):
        return (
            'algorithm.kl.estimator = "full" needs the logits of both models, which never leave the '
            'actor\'s process: set algorithm.kl.where = "loss" and reference.placement = "colocated", or '
            'use "k3"'
        )
    return None


def _straight_through_has_a_gradient(config: RunConfig) -> str | None:
    kl = config.algorithm.kl
    if kl and kl.estimator.endswith("+") and kl.where == "reward":
        return (
            f'algorithm.kl.estimator = "{kl.estimator}" differs from "{kl.estimator[:-1]}" only in its '
            'gradient, and a reward has no gradient: set algorithm.kl.where = "loss", or estimator = '
            f'"{kl.estimator[:-1]}"'
        )
    return None


def _adaptive_kl_is_in_the_reward(config: RunConfig) -> str | None:
    kl = config.algorithm.kl
    if kl and kl.target is not None and kl.where == "loss":
        return (
            "algorithm.kl.target adapts the coefficient of a penalty in the reward, and a coefficient in "
            'the loss is fixed: set algorithm.kl.where = "reward", or remove target'
        )
    return None


def _correction_has_two_logprobs(config: RunConfig) -> str | None:
    if config.algorithm.correction and config.algorithm.old_logprobs == "rollout":
        return (
            "algorithm.correction corrects the difference between trainer and rollout logprobs, which "
            'the ratio of the loss already does with algorithm.old_logprobs = "rollout": set it to '
            '"trainer", or remove the correction'
        )
    return None


def _corrections_have_intervals(config: RunConfig) -> str | None:
    for correction in config.algorithm.correction:
        if correction.method == "truncate" and correction.low > 0:
            return (
                f'algorithm.correction.low = {correction.low:g}: "truncate" limits weights only from above: '
                'set it to 0, or method to "mask" or "reject"'
            )
        if correction.low >= correction.high:
            return (
                f"algorithm.correction: no weight is between low = {correction.low:g} and "
                f"high = {correction.high:g}: set low below high"
            )
    return None


def _one_correction_weighs(config: RunConfig) -> str | None:
    """Two would square the weights."""
    for correction in config.algorithm.correction[1:]:
        if correction.method != "reject":
            return (
                f"algorithm.correction: only the first of {len(config.algorithm.correction)} may weight "
                f'advantages, but another has method = "{correction.method}": set the others to "reject"'
            )
    return None


def _all_tokens_can_be_sampled(config: RunConfig) -> str | None:
    """Engines report log-probabilities of what is left of a cut distribution."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    is_cut = sampling.top_p < 1 or sampling.top_k > 0
    trains = config.run.mode in ("train", "train_only")
    if trains and is_cut and algorithm.old_logprobs == "trainer" and not algorithm.correction:
        return (
            f"rollout.sampling: top_p = {sampling.top_p:g} and top_k = {sampling.top_k} truncate the "
            "sampled distribution, but the trainer's log-probabilities are of the full one: set top_p to 1 "
            "and top_k to 0, or correct the difference with an [algorithm.correction]"
        )
    return None


def _sequence_losses_are_averaged_by_sequence(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.loss.has("sequence_mean") and algorithm.aggregation != "seq_mean_token_mean":
        return (
            f'algorithm.loss = "{algorithm.loss.name}" is defined as a mean over sequences: '
            'set algorithm.aggregation = "seq_mean_token_mean"'
        )
    return None


def _updates_stay_on_policy_without_a_ratio(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    num_updates = algorithm.num_minibatches * algorithm.num_epochs
    if algorithm.loss.has("without_ratio") and num_updates > 1:
        return (
            f'algorithm.loss = "{algorithm.loss.name}" has no ratio to the policy that generated the '
            f"samples, so it would be biased after the first of a step's {num_updates} updates: set "
            'algorithm.num_minibatches and num_epochs to 1, or use "ppo_clip"'
        )
    return None


def _samples_are_fresh_without_a_ratio(config: RunConfig) -> str | None:
    algorithm, staleness = config.algorithm, config.coordinator.max_staleness
    if algorithm.loss.has("without_ratio") and staleness and not algorithm.correction:
        return (
            f'algorithm.loss = "{algorithm.loss.name}" has no ratio to the policy that generated the '
            f"samples, which may be coordinator.max_staleness = {staleness} versions old: add an "
            '[algorithm.correction], set it to 0, or use "ppo_clip"'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _full_kl_sees_both_vocabularies,
    _straight_through_has_a_gradient,
    _adaptive_kl_is_in_the_reward,
    _correction_has_two_logprobs,
    _corrections_have_intervals,
    _one_correction_weighs,
    _all_tokens_can_be_sampled,
    _sequence_losses_are_averaged_by_sequence,
    _updates_stay_on_policy_without_a_ratio,
    _samples_are_fresh_without_a_ratio,
)
