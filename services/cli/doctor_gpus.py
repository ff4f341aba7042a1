"""What `atoll doctor` finds out about GPUs: by nvidia-smi, and by the environments that are to use them.

It asks nvidia-smi itself, since the packages that runtime/gpus.py imports may be what is missing.
"""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from atoll.cli.launch.findings import Finding, FindingState

MIB, GIB = 1 << 20, 1 << 30
FREE_SHARE = 0.9  # of a GPU's memory, that nobody else should use
SHM = Path("/dev/shm")
MIN_SHM = GIB  # NCCL and SGLang exchange data there; a container has 64 MiB by default
MIN_OPEN_FILES = 65_536
DRIVERS = {"13": 580, "12": 525}  # lowest driver of each CUDA version
COLUMNS = ("index", "name", "driver_version", "memory.total", "memory.free")
PROBE = """
import json, torch
from importlib.metadata import PackageNotFoundError, version
def installed(name):
    try: return version(name)
    except PackageNotFoundError: return ""
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda or "", "devices":
    torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "nccl": installed("nvidia-nccl-cu13") or installed("nvidia-nccl-cu12"),
    "cupy": installed("cupy-cuda13x") or installed("cupy-cuda12x")}))
"""

Probe = Mapping[str, str | int]


def gpus(pythons: Mapping[str, Path]) -> Iterator[Finding]:
    """`pythons`: the interpreters that compute, by what they serve: "trainer", "rollout"."""
    if not shutil.which("nvidia-smi"):
        yield Finding("gpu", "none; using the CPU set-up")
        return
    answer = _ask(f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
    if answer.returncode:
        found = answer.stdout.strip() or answer.stderr.strip()
        yield Finding("gpu", found, FindingState.MISSING, "nvidia-smi failed: check the driver")
        return
    rows = [dict(zip(COLUMNS, line.split(", "), strict=True)) for line in answer.stdout.splitlines() if line]
    yield from (memory(row) for row in rows)
    probes = dict[str, Probe]()
    for service, python in pythons.items():
        try:
            probes[service] = probe(python)
        except (OSError, ValueError) as error:
            yield Finding(f"torch, {service}", str(error), FindingState.MISSING, f"check {python}")
        else:
            yield cuda(service, probes[service], rows[0]["driver_version"] if rows else "")
    if len(probes) > 1:
        yield nccl(probes)
    if len(rows) > 1:
        yield peers(_ask("topo", "-p2p", "r").stdout)
    yield shared_memory(shutil.disk_usage(SHM).total if SHM.is_dir() else 0)
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def memory(row: Mapping[str, str]) -> Finding:
    total, free = (int(row[f"memory.{kind}"]) * MIB for kind in ("total", "free"))
    what, found = f"gpu {row['index']}", f"{row['name']}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < FREE_SHARE * total:
        advice = "other processes use it (nvidia-smi lists them): end them, or leave it out of [placement]"
        return Finding(what, found, FindingState.WARNING, advice)
    return Finding(what, found)


def probe(python: Path) -> Probe:
    """Raises OSError if there is no such interpreter, ValueError with its last line if it has no torch."""
    answer = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, timeout=120)
    if answer.returncode:
        raise ValueError(answer.stderr.strip().rpartition("\n")[2])
    found: Probe = json.loads(answer.stdout)
    return found


def cuda(service: str, found: Probe, driver: str) -> Finding:
    what = f"torch, {service}"
    version = str(found["cuda"])
    if not version:
        advice = "it computes on the CPU: for GPUs, install the extra `trainer` or `rollout` (README)"
        return Finding(what, f"{found['torch']}, without CUDA", FindingState.WARNING, advice)
    text = f"{found['torch']} for CUDA {version}, driver {driver}, {found['devices']} devices"
    needed = DRIVERS.get(version.partition(".")[0], 0)
    if not found["devices"]:
        advice = "it cannot use the GPUs: check the driver, CUDA_VISIBLE_DEVICES and the container's GPUs"
        if int(driver.partition(".")[0] or 0) < needed:
            advice = f"CUDA {version} needs driver {needed} or later: update it"
        return Finding(what, text, FindingState.MISSING, advice)
    if not found["cupy"]:
        advice = f"{sys.executable} -m pip install cupy-cuda{version.partition('.')[0]}x"
        return Finding(what, f"{text}; no cupy, which moves weights", FindingState.MISSING, advice)
    return Finding(what, text)


def nccl(probes: Mapping[str, Probe]) -> Finding:
    """NCCL refuses a communicator between two of its versions."""
    versions = {service: str(found["nccl"]) or "none" for service, found in probes.items()}
    found = ", ".join(f"{service} {version}" for service, version in versions.items())
    if len(set(versions.values())) > 1:
        advice = 'install the same torch in both, or set weights.transport = "shm" or "tcp"'
        return Finding("nccl", found, FindingState.MISSING, advice)
    return Finding("nccl", found)


def peers(matrix: str) -> Finding:
    """`matrix`: of `nvidia-smi topo -p2p r`: a row per GPU, with OK for each that it can read directly."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    rows = [row for row in rows if not row[1].startswith("GPU")]  # the header
    blocked = [
        f"{row[0]}-GPU{number}"
        for row in rows
        for number, cell in enumerate(row[1:])
        if cell not in ("X", "OK")
    ]
    if blocked:
        advice = "slower: weights and gradients between these go through host memory"
        return Finding("peer access", f"not {', '.join(blocked)}", FindingState.WARNING, advice)
    return Finding("peer access", f"between all {len(rows)} GPUs")


def shared_memory(total: int) -> Finding:
    found = f"{total / GIB:.1f} GiB"
    if total < MIN_SHM:
        advice = "NCCL needs at least 1 GiB: start the container with --shm-size=16g (Compose: shm_size)"
        return Finding("/dev/shm", found, FindingState.MISSING, advice)
    return Finding("/dev/shm", found)


def locked_memory(limit: int) -> Finding:
    if limit >= 0:
        advice = (
            "NCCL over InfiniBand needs it unlimited: ulimit -l unlimited (Compose: ulimits, memlock: -1)"
        )
        return Finding("locked memory", f"{limit / MIB:.1f} MiB", FindingState.WARNING, advice)
    return Finding("locked memory", "unlimited")


def open_files(limit: int) -> Finding:
    if 0 <= limit < MIN_OPEN_FILES:
        advice = f"large runs may need more: ulimit -n {MIN_OPEN_FILES} (Compose: ulimits, nofile)"
        return Finding("open files", str(limit), FindingState.WARNING, advice)
    return Finding("open files", "unlimited" if limit < 0 else str(limit))


def _ask(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
