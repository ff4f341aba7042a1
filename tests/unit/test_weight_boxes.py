"""Copies and checksums of parts: the host's against xxhash, the devices' against Python's integers."""

import pytest
import torch
import xxhash

from atoll.weights import boxes
from atoll.weights.boxes import box_view, copy_part, device_checksum


def splitmix64(number: int) -> int:
    """Output `number` from seed 0; the first is 0xE220A8397B1DCDAF."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def words_sum(data: bytes, block: int = 1 << 20) -> int:
    """The definition, in Python's integers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    factors = [splitmix64(i) for i in range(min(block, len(words)))]
    sums = [
        sum(word * factor for word, factor in zip(words[first : first + block], factors, strict=False))
        for first in range(0, len(words) // block * block + 1, block)
    ]
    if len(sums) == 1:
        return sums[0] % 2**64
    return words_sum(b"".join((s % 2**64).to_bytes(8, "little") for s in sums), block)


def test_splitmix64_is_the_published_generator():
    """Reference outputs of seed 0, from Vigna's splitmix64.c."""
    assert [splitmix64(i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 17)])
def test_device_checksum_is_its_definition(shape, dtype):
    box = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int(device_checksum(box)) % 2**64 == words_sum(box.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("num_words", [15, 16, 17, 32, 50, 1000])
def test_device_checksum_of_several_blocks(monkeypatch, num_words):
    monkeypatch.setattr(boxes, "NUM_FACTORS", 16)
    boxes._factors.cache_clear()
    box = torch.randint(-(2**31), 2**31, (num_words, 1), generator=torch.Generator().manual_seed(0)).int()
    assert int(device_checksum(box)) % 2**64 == words_sum(box.numpy().tobytes(), block=16)
    boxes._factors.cache_clear()


def test_device_checksum_sees_what_simple_sums_do_not():
    """A flipped bit; swapped words; the signs of two elements; a strided box sums like a dense one."""
    box = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    expected = device_checksum(box)
    exchanged, negated, flipped = box.clone(), box.clone(), box.clone()
    exchanged[0, 0], exchanged[5, 3] = box[5, 3], box[0, 0]
    negated[0, 0] *= -1
    negated[5, 3] *= -1
    flipped.view(torch.int32)[7, 5] ^= 1
    for other in (exchanged, negated, flipped):
        assert device_checksum(other) != expected
    wide = torch.zeros(8 * 10)
    box_view(wide, 8, 6, 2, 9).copy_(box)
    assert device_checksum(box_view(wide, 8, 6, 2, 9)) == expected


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])  # boxes are cut between rows, or copied together
def test_boxes_are_packed_and_unpacked_with_the_checksum_of_the_part(monkeypatch, chunk_bytes):
    monkeypatch.setattr(boxes, "CHUNK_BYTES", chunk_bytes)
    sources = [torch.randn(30, 10), torch.randn(2, 3), torch.randn(9, 5)[:, 1:4]]
    part = torch.zeros(2 * (300 + 6 + 27), dtype=torch.uint8)
    pieces = part.view(torch.bfloat16).split([300, 6, 27])
    packed = [piece.view(source.shape) for piece, source in zip(pieces, sources, strict=True)]
    data = b"".join(source.bfloat16().contiguous().view(torch.int16).numpy().tobytes() for source in sources)
    assert copy_part(part, packed, sources) == xxhash.xxh3_64_intdigest(data)
    assert part.numpy().tobytes() == data
    into = [torch.zeros(30, 15, dtype=torch.bfloat16)[:, 5:], torch.zeros(2, 3), torch.zeros(9, 3)]
    assert copy_part(part, into, packed) == xxhash.xxh3_64_intdigest(data)
    for box, source in zip(into, sources, strict=True):
        torch.testing.assert_close(box.float(), source.bfloat16().float(), rtol=0, atol=0)
