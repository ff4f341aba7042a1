"""Assigns parts to rounds that use each rank at most once. Pure.

Letter in shapes: P parts.
"""

from collections.abc import Sequence

import numpy as np

from atoll.wire.types import Int64


def rounds(source_P: Sequence[int], target_P: Sequence[int]) -> Int64:
    """[P] the round of each part: in each round a source sends at most one part and a target receives at most
    one.

    There are as many rounds as the busiest rank has parts, which is the minimum: a bipartite multigraph's
    edges need no more colours than its largest degree (König, Math. Ann. 77, 1916). This is his proof as an
    algorithm: if no round is free at both ends of a part, the path of parts that alternates between a round
    free at the source and one free at the target swaps the two. A path visits a target at most once, so this
    is O(parts x targets).
    """
    ends = [(source, -1 - target) for source, target in zip(source_P, target_P, strict=True)]
    degrees: dict[int, int] = {}
    for end in (end for part in ends for end in part):
        degrees[end] = degrees.get(end, 0) + 1
    every_round = (1 << max(degrees.values(), default=0)) - 1
    free = dict.fromkeys(degrees, every_round)  # bit r: nothing in round r
    part_in: dict[int, dict[int, int]] = {end: {} for end in degrees}  # by round

    for part, (source, target) in enumerate(ends):
        if not free[source] & free[target]:
            _exchange(target, _lowest(free[source]), _lowest(free[target]), ends, free, part_in)
        chosen = _lowest(free[source] & free[target])
        for end in (source, target):
            part_in[end][chosen] = part
            free[end] ^= 1 << chosen

    round_P = np.zeros(len(ends), np.int64)
    for source in {source for source, _ in ends}:
        for number, part in part_in[source].items():
            round_P[part] = number
    return round_P


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _exchange(
    begin: int,
    taken: int,
    spare: int,
    ends: Sequence[tuple[int, int]],
    free: dict[int, int],
    part_in: dict[int, dict[int, int]],
) -> None:
    """Frees round `taken` at `begin`, which has `spare` free: the parts on the path from there that alternate
    between the two rounds swap them."""
    path, vertex, step = [], begin, taken
    while (part := part_in[vertex].pop(step, None)) is not None:
        source, target = ends[part]
        vertex = target if vertex == source else source
        part_in[vertex].pop(step)
        step = taken + spare - step
        path.append((part, step))
    for part, step in path:
        for end in ends[part]:
            part_in[end][step] = part
    for end in (begin, vertex):
        free[end] ^= 1 << taken | 1 << spare
