"""A delta of two versions gives the new one bit for bit, whatever the bits mean."""

from collections.abc import Callable

import pytest
import torch

from atoll.weights.delta import MAX_SHARE, decode, encode

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SIZES = [1, 3, 4, 255, 256, 257, 4099, 70_001]


def random_bits(num: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every pattern is equally likely: NaNs of all payloads, infinities, both zeros, subnormals."""
    num_bytes = num * dtype.itemsize
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


def assert_round_trip(old: torch.Tensor, new: torch.Tensor, delta: torch.Tensor | None) -> None:
    assert delta is not None
    got = old.clone()
    decode(delta, got)
    assert torch.equal(got.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.05])
def test_random_bits(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ints = INTS[dtype.itemsize]
    for num in SIZES:
        old = random_bits(num, dtype, generator)
        changed = torch.rand(num, generator=generator) < share
        other = random_bits(num, dtype, generator)
        new = torch.where(changed, other.view(ints), old.view(ints)).view(dtype)
        delta = encode(old, new)
        if delta is None:  # its 8-byte header is too large for such a small part
            assert num < 4099 or (dtype.itemsize == 1 and share == 0.05)
        else:
            assert len(delta) <= MAX_SHARE * new.nbytes
            assert_round_trip(old, new, delta)


@pytest.mark.parametrize("step", [1, -1, 127, -127, -128, 128, 32767, -32768])
@pytest.mark.parametrize("places", [[0], [9999], [0, 256, 257, 769, 9999], list(range(5000, 5040))], ids=len)
def test_every_distance_and_difference(places: list[int], step: int) -> None:
    """At both ends of a byte's range, and beyond; sums wrap around."""
    old = torch.randint(-32768, 32767, (10_000,), dtype=torch.int16)
    new = old.clone()
    new[places] += torch.tensor(step, dtype=torch.int16)
    assert_round_trip(old.view(torch.bfloat16), new.view(torch.bfloat16), encode(old, new))


def test_size() -> None:
    """One in 100 of 100,000 moved by one: an 8-byte header and two bytes each, 2.008 % instead of 200,000."""
    old = torch.arange(100_000, dtype=torch.int32).to(torch.int16)
    new = old.clone()
    new[99::100] += 1
    delta = encode(old, new)
    assert delta is not None
    assert len(delta) == 8 + 2 * 1000
    nothing = encode(old, old)
    assert nothing is not None
    assert len(nothing) == 8


def test_one_far_away_is_reached_in_steps_of_256() -> None:
    """Element 1,000 is 1,001 from the beginning: three elements are listed on the way, then itself."""
    old = torch.zeros(2000, dtype=torch.bfloat16)
    new = old.clone()
    new[1000] = 1e-40  # a subnormal: its pattern differs by less than 128
    delta = encode(old, new)
    assert delta is not None
    assert len(delta) == 8 + 2 * 4


def test_all_changed_is_not_worth_a_delta() -> None:
    old = torch.rand(10_000).bfloat16()
    assert encode(old, old + 1) is None


def test_a_part_may_begin_at_any_element_and_a_delta_at_any_byte() -> None:
    memory = torch.randint(-32768, 32767, (10_001,), dtype=torch.int16)
    old = memory[1:].view(torch.bfloat16)
    new = old.clone()
    new[::50] = 0
    delta = encode(old, new)
    assert delta is not None
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), delta])[3:]
    decode(shifted, old)
    assert torch.equal(memory[1:], new.view(torch.int16)), "in place"


@pytest.mark.parametrize(
    "spoil", [lambda d: d[:-5], lambda d: d.add(1), lambda d: d.index_fill(0, torch.tensor([7]), 255)]
)
def test_what_is_no_delta_of_this_part_is_refused(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    old = torch.zeros(2000, dtype=torch.bfloat16)
    new = old.clone()
    new[1900:] = 1.0
    delta = encode(old, new)
    assert delta is not None
    with pytest.raises(ValueError, match="a delta of"):
        decode(spoil(delta), old)
    with pytest.raises(ValueError, match="other than 1950 elements"):
        decode(delta, old[:1950])
    assert not old.any()
