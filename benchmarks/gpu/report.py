"""What a part measures, and the table of all of them."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """One line of a part's table."""

    what: str
    value: str


def machine() -> str:
    """The GPU and the versions that figures depend on; once there is a GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return (
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"NCCL {nccl}, driver {driver}"
    )


def markdown(machine: str, parts: Mapping[str, Sequence[Row]]) -> str:
    """A table of each part, by its title."""
    lines = [machine, ""]
    for title, rows in parts.items():
        lines += [f"**{title}**", "", "| what | measured |", "|---|---|"]
        lines += [f"| {row.what} | {row.value} |" for row in rows]
        lines.append("")
    return "\n".join(lines)
