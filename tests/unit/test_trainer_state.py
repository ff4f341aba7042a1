"""Flat ranges of tensors as boxes."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.trainer.state import boxes_of_range


@pytest.mark.parametrize(
    ("shape", "start", "end", "expected"),
    [
        ((7,), 2, 5, [((2,), (3,))]),
        # rows of 4: elements 0-3, 4-7, 8-11, 12-15
        ((4, 4), 0, 16, [((0, 0), (4, 4))]),
        ((4, 4), 5, 7, [((1, 1), (1, 2))]),
        ((4, 4), 6, 14, [((1, 2), (1, 2)), ((2, 0), (1, 4)), ((3, 0), (1, 2))]),
        ((4, 4), 4, 12, [((1, 0), (2, 4))]),
        ((4, 4), 3, 3, []),
    ],
)
def test_a_range_of_a_matrix_is_at_most_three_boxes(
    shape: tuple[int, ...], start: int, end: int, expected: list[object]
) -> None:
    assert list(boxes_of_range(shape, start, end)) == expected


@given(st.data())
def test_boxes_hold_the_elements_of_the_range_in_their_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    start = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(start, prod(shape)))
    elements = np.arange(prod(shape)).reshape(shape)
    found = [
        elements[tuple(slice(a, a + n) for a, n in zip(at, lengths, strict=True))].flatten()
        for at, lengths in boxes_of_range(shape, start, end)
    ]
    np.testing.assert_array_equal(np.concatenate([[], *found]), np.arange(start, end))
