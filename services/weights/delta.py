"""Lossless deltas between two versions of a part. Pure torch, on whatever device the parts are.

After a step of AdamW at a small learning rate, most bfloat16 weights are unchanged, and most others have
moved to a neighbouring value. A delta lists the changed elements: the distance from the previous one in one
byte, and the difference of the bit patterns, read as integers, in another. Values that do not fit: a distance
above 256 is split by listing unchanged elements in between, with difference 0; a difference outside [-127,
127] is listed as -128 and stored in full in a separate list.

    int64 K | W differences in full | K distances less 1 (uint8) | K differences (int8)

Letters in shapes: N elements of the part, C that changed, K listed, W listed in full.
"""

import torch

MAX_SHARE = 0.5  # of the full size; a larger delta is not worth its two passes
REACH = 256  # maximum distance, in elements
IN_FULL = -128
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def encode(old_N: torch.Tensor, new_N: torch.Tensor) -> torch.Tensor | None:
    """uint8 [bytes] from which `decode` turns `old` into `new`, bit for bit; None if it would exceed
    MAX_SHARE of the bytes of `new`. Both are dense and of one dtype."""
    old_N, new_N = (_integers(part.clone() if part.data_ptr() % 8 else part) for part in (old_N, new_N))
    position_C = _find_changed(old_N, new_N)
    max_bytes = int(new_N.nbytes * MAX_SHARE)
    if 2 * len(position_C) > max_bytes:
        return None
    # wraps around, and so does the sum in `decode`
    difference_C = new_N.index_select(0, position_C) - old_N.index_select(0, position_C)
    in_full_C = (difference_C < -127) | (difference_C > 127)
    in_full_W = difference_C[in_full_C]

    distance_C = position_C.diff(prepend=position_C.new_tensor([-1]))
    passed_C = (distance_C - 1) >> 8  # number of unchanged elements listed to bridge the distance
    listed_C = passed_C.cumsum(0) + torch.arange(len(position_C), device=position_C.device)
    num_listed = int(listed_C[-1]) + 1 if len(listed_C) else 0
    distance_K = torch.full((num_listed,), REACH - 1, dtype=torch.uint8, device=new_N.device)
    distance_K[listed_C] = (distance_C - 1 & REACH - 1).to(torch.uint8)
    difference_K = torch.zeros(num_listed, dtype=torch.int8, device=new_N.device)
    difference_K[listed_C] = difference_C.masked_fill(in_full_C, IN_FULL).to(torch.int8)
    head = torch.tensor([num_listed], device=new_N.device)
    delta = torch.cat([part.view(torch.uint8) for part in (head, in_full_W, distance_K, difference_K)])
    return delta if len(delta) <= max_bytes else None


def decode(delta: torch.Tensor, into_N: torch.Tensor) -> None:
    """Turns the dense part `into` from `old` into the `new` of the delta, in place.

    Raises ValueError and leaves `into` unchanged if the bytes are not a delta of such a part.
    """
    into_N = _integers(into_N)
    num_listed = int(delta[:8].clone().view(torch.int64))  # a copy: a part may begin at any byte
    in_full_end, end = len(delta) - 2 * num_listed, len(delta) - num_listed
    if not 8 <= in_full_end <= end or in_full_end % into_N.itemsize:
        raise ValueError(f"a delta of {len(delta)} bytes cannot list {num_listed} elements")
    in_full_W = delta[8:in_full_end].clone().view(into_N.dtype)
    position_K = (delta[in_full_end:end].to(torch.int64) + 1).cumsum(0) - 1
    difference_K = delta[end:].view(torch.int8).to(into_N.dtype)
    is_in_full_K = difference_K == IN_FULL
    if int(is_in_full_K.sum()) != len(in_full_W) or (num_listed and int(position_K[-1]) >= len(into_N)):
        raise ValueError(f"a delta of other than {len(into_N)} elements of {into_N.itemsize} bytes")
    difference_K[is_in_full_K] = in_full_W
    into_N[position_K] += difference_K


def _find_changed(old_N: torch.Tensor, new_N: torch.Tensor) -> torch.Tensor:
    """[C] indices of differences, ascending. Compares words of 8 bytes first, since most are equal."""
    shift = {1: 3, 2: 2, 4: 1}[new_N.itemsize]  # from an element to its word; division of int64 is slow
    whole = len(new_N) >> shift << shift
    old_words, new_words = (part[:whole].view(torch.int64) for part in (old_N, new_N))
    word_W = (old_words != new_words).nonzero().squeeze(1)
    old_F, new_F = (words.index_select(0, word_W).view(new_N.dtype) for words in (old_words, new_words))
    found_C = (old_F != new_F).nonzero().squeeze(1)
    position_C = (word_W.index_select(0, found_C >> shift) << shift) + (found_C & (1 << shift) - 1)
    return torch.cat([position_C, (old_N[whole:] != new_N[whole:]).nonzero().squeeze(1) + whole])


def _integers(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1).view(INTEGERS[part.itemsize])
