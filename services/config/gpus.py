"""GPUs as [placement.gpus] writes them."""

import re
from collections.abc import Iterable
from typing import NamedTuple

_ITEM = re.compile(r"(?:(?P<host>[A-Za-z0-9_.-]*):)?(?P<first>\d+)(?:-(?P<last>\d+))?")


class Gpu(NamedTuple):
    host: str  # "": the machine that `atoll run` runs on
    number: int  # nvidia-smi's index


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of "0-2,6" or "0-7,node1:0-7"; a host holds for the items behind it. Raises ValueError."""
    gpus: list[Gpu] = []
    host = ""
    for item in filter(None, text.split(",")):
        if not (match := _ITEM.fullmatch(item.strip())):
            raise ValueError(
                f'placement.gpus: got "{text}", expected GPUs such as "0-3", "0,2" or "0-7,node1:0-7"'
            )
        host = host if match["host"] is None else match["host"]
        first, last = int(match["first"]), int(match["last"] or match["first"])
        gpus += [Gpu(host, index) for index in range(first, last + 1)]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f'placement.gpus: "{text}" names a GPU twice: name each once')
    return tuple(gpus)


def check_gpus(text: str) -> str:
    parse_gpus(text)
    return text


def describe_gpus(gpus: Iterable[Gpu]) -> str:
    """What `parse_gpus` reads, with ranges."""
    runs: list[tuple[str, int, int]] = []
    for host, index in gpus:
        if runs and runs[-1][0] == host and runs[-1][2] + 1 == index:
            runs[-1] = host, runs[-1][1], index
        else:
            runs.append((host, index, index))
    items, last_host = [], ""
    for host, first, last in runs:
        indices = str(first) if first == last else f"{first}-{last}"
        items.append(indices if host == last_host else f"{host}:{indices}")
        last_host = host
    return ",".join(items)
