"""The learning rate of a step. Pure."""

import math

from atoll.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, num_steps: int) -> float:
    """Of step 1 to `num_steps` of the run: linear warm-up, then constant, then the schedule's decay.

    Warm-up ends at step warmup_steps with the whole rate. Of D steps of decay, number d from 0 has the share
    min + (1 - min) * curve, with curve = (1 + cos(pi d / D)) / 2 for cosine (Loshchilov & Hutter 2016,
    arXiv:1608.03983) and 1 - d / D for wsd (Hu et al. 2024, arXiv:2404.06395), so that no step is wasted:
    the minimum would be reached one step after the last.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    decay = optimizer.decay_steps or num_steps - warmup
    progress = max(0, step - 1 - (num_steps - decay)) / decay
    curve = (1 + math.cos(math.pi * progress)) / 2 if optimizer.schedule == "cosine" else 1 - progress
    return peak * (optimizer.min_learning_rate_share + (1 - optimizer.min_learning_rate_share) * curve)
