"""KL penalty in the reward. Pure numpy.

T: loss-masked tokens of all samples, as in advantage.py. KL in the loss is in services/trainer/losses/kl.py.
"""

import numpy as np

from atoll.coordinator.algorithm.estimates import Float64, Floats


def kl_penalty(logprobs_T: Floats, ref_logprobs_T: Floats, estimator: str) -> Float64:
    """[T] nats: each token's estimate of KL(policy || reference), from its logprobs under both.

    With x = logprob - reference logprob: k1 is x, abs |x|, k2 x^2 / 2, k3 e^-x + x - 1 (x clamped to +-20,
    the result to +-10). Source: http://joschu.net/blog/kl-approx.html. A "+" asks for k2's gradient; a reward
    has none, so the value is that of the name without it.

    Raises ValueError for an unknown estimator.
    """
    x_T = logprobs_T.astype(np.float64) - ref_logprobs_T
    match estimator.removesuffix("+"):
        case "k1":
            return x_T
        case "abs":
            return np.abs(x_T)
        case "k2":
            return x_T**2 / 2
        case "k3":
            x_T = np.clip(x_T, -20, 20)
            return np.clip(np.exp(-x_T) + x_T - 1, -10, 10)
        case "full":
            raise ValueError(
                'algorithm.kl.estimator = "full" sums over the vocabulary, and the reward is computed from '
                'one logprob per token: use "k1", "abs", "k2" or "k3", or algorithm.kl.where = "loss"'
            )
        case _:
            raise ValueError(
                f'algorithm.kl.estimator = "{estimator}" is unknown: use "k1", "abs", "k2" or "k3"'
            )


def adapt_kl_coef(coef: float, kl: float, target: float, horizon: int, num_samples: int) -> float:
    """The next penalty coefficient: higher if the KL per token was above its target, lower if below.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon, so `horizon` samples change it by at
    most about a fifth. Source: https://arxiv.org/abs/1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
