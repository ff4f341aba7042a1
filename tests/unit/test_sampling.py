"""Random streams and draws against published and hand-worked numbers."""

import numpy as np
import pytest
import torch

from atoll.rollout.engines.sampling import draw, stream_key, uniforms
from atoll.wire.types import GroupId, SampleId, TurnId


def test_stream_is_splitmix64():
    """The first outputs for seed 1234567 as the reference implementation prints them."""
    expected = np.array(
        [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431], np.uint64
    )
    keys = np.full(4, 1234567, np.uint64)
    np.testing.assert_array_equal(uniforms(keys, np.arange(4)), (expected >> np.uint64(12)) / 2.0**52)


def key(seed: int, epoch: int, prompt: int, index: int, turn: int = 0, branch: int = 0) -> int:
    return stream_key(seed, TurnId(SampleId(GroupId("toy", epoch, prompt), index), 0, turn, branch))


def test_every_part_of_the_key_matters():
    base = (5, 1, 7, 3)
    keys = {key(*base)}
    keys |= {key(*(n + (i == j) for j, n in enumerate(base))) for i in range(4)}
    keys |= {key(*(n << 40 if i == j else n for j, n in enumerate(base))) for i in range(4)}
    keys |= {key(1, 5, 7, 3), key(5, 1, 3, 7)}
    keys |= {key(*base, 1), key(*base, 0, 1), key(*base, 2), key(*base, 1, 1), key(*base, 1, 2)}
    assert len(keys) == 16
    assert all(0 <= key < 1 << 64 for key in keys)


def test_first_turns_and_other_attempts_draw_what_they_always_drew():
    """As recorded before there were turns."""
    id = TurnId(SampleId(GroupId("toy", 1, 7), 3), attempt=0)
    assert stream_key(5, id) == stream_key(5, id._replace(attempt=4)) == 10529423894796280977


def test_uniforms_fill_the_unit_interval():
    """Over samples at one position and over positions of one sample: moments and correlation."""
    keys = np.array([key(0, 0, 0, index) for index in range(20_000)], np.uint64)
    over_samples = uniforms(keys, np.full(20_000, 3))
    over_positions = uniforms(np.full(20_000, keys[0]), np.arange(20_000))
    for u in (over_samples, over_positions):
        assert 0 <= u.min() < 1e-3
        assert 1 - 1e-3 < u.max() < 1
        assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20_000)
        assert abs(u.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(20_000)


def drawn(
    probabilities: list[float], u: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[list[int], list[float]]:
    rows = len(u)
    logits = torch.tensor(probabilities).log().repeat(rows, 1)
    full = np.full(rows, 1.0)
    tokens, logprobs = draw(
        logits, np.array(u), full * temperature, full * top_p, np.full(rows, top_k, np.int64)
    )
    return tokens.tolist(), np.exp(logprobs).round(6).tolist()


@pytest.mark.parametrize(
    ("settings", "u", "tokens", "probabilities"),
    [
        # cumulative 0.1, 0.6, 0.7, 1.0
        ({}, [0.0, 0.09, 0.11, 0.59, 0.61, 0.71, 1 - 2**-52], [0, 0, 1, 1, 2, 3, 3], None),
        # squared and renormalised: 1/36, 25/36, 1/36, 9/36
        ({"temperature": 0.5}, [0.02, 0.5, 0.73, 0.9], [0, 1, 2, 3], [1 / 36, 25 / 36, 1 / 36, 9 / 36]),
        # the two largest, 5/8 and 3/8
        ({"top_k": 2}, [0.0, 0.62, 0.63, 0.999], [1, 1, 3, 3], [5 / 8, 5 / 8, 3 / 8, 3 / 8]),
        # 0.5 + 0.3 reaches 0.6
        ({"top_p": 0.6}, [0.0, 0.62, 0.63], [1, 1, 3], [5 / 8, 5 / 8, 3 / 8]),
        # 0.5 alone reaches 0.5
        ({"top_p": 0.5}, [0.0, 0.999], [1, 1], [1, 1]),
        # top k first: of 5/8 and 3/8 the first reaches 0.6
        ({"top_k": 2, "top_p": 0.6}, [0.0, 0.999], [1, 1], [1, 1]),
        # greedy ignores the draw and the cuts; its logprob is that of temperature 1
        ({"temperature": 0.0, "top_k": 3}, [0.0, 0.999], [1, 1], [0.5, 0.5]),
    ],
)
def test_draws_by_hand(settings, u, tokens, probabilities):
    got_tokens, got_probabilities = drawn([0.1, 0.5, 0.1, 0.3], u, **settings)
    assert got_tokens == tokens
    expected = probabilities or [[0.1, 0.5, 0.1, 0.3][token] for token in tokens]
    np.testing.assert_allclose(got_probabilities, expected, atol=1e-6)


def test_the_largest_draw_stays_within_the_support():
    """Rounding must not push it past the last token, nor onto one of probability 0."""
    largest = np.array([1 - 2.0**-52] * 50)
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, 990:] = -torch.inf
    full = np.ones(50)
    tokens, logprobs = draw(logits, largest, full, full, np.zeros(50, np.int64))
    assert tokens.max() < 990
    assert np.isfinite(logprobs).all()
