"""`atoll doctor`: checks this machine and says what is missing and how to fix it.

Imports only what is always installed.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.cli.doctor_gpus import gpus
from atoll.cli.launch.findings import Finding, FindingState, loopback

GIB = 1 << 30
IN_CHECKOUT = (Path(__file__).parents[2] / "pyproject.toml").exists()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help="also check what this run's TOML file needs")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if something is missing that a run on this machine needs."""
    findings = [
        python(),
        *packages(),
        cores(len(os.sched_getaffinity(0))),
        memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        shared_memory(),
        *gpus(interpreters(arguments.config)),
        asyncio.run(sandbox()),
        git(),
    ]
    if arguments.config:
        findings.append(rollout_environment(arguments.config))
        findings.extend(chat_templates(arguments.config))
        findings.extend(start_of_run(arguments.config))
    else:
        findings += [loopback(), runs_folder(Path("runs"))]
    _print(findings)
    missing = sum(finding.state is FindingState.MISSING for finding in findings)
    command = f"atoll run {arguments.config}" if arguments.config else "atoll quickstart"
    print(f"{missing} missing" if missing else f"ready for: {command}")
    return 1 if missing else 0


def install(extra: str = "cpu") -> str:
    return f"pip install --editable '.[{extra}]'" if IN_CHECKOUT else f"pip install 'atoll[{extra}]'"


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.what) for finding in findings)
    indent = f"{'':8} {'':{width}}  "
    for finding in findings:
        found = finding.found.replace("\n", f"\n{indent}")
        print(f"{finding.state.value:8} {finding.what:{width}}  {found}")
        if finding.advice:
            advice = finding.advice.replace("\n", f"\n{indent}   ")
            print(f"{indent}-> {advice}")


def python() -> Finding:
    return Finding("python", f"{platform.python_version()} at {sys.executable}")


def interpreters(path: Path | None) -> dict[str, Path]:
    """Of the processes that compute: the trainer's and, if they have their own, the replicas'."""
    from atoll.config.load import load

    python = load(path).rollout.python if path else None
    return {"trainer": Path(sys.executable)} | ({"rollout": python} if python else {})


def packages() -> Iterator[Finding]:
    """One finding per requirement of the installed set-up: installed, in a matching version."""
    extra = "trainer" if importlib.util.find_spec("cupy") else "cpu"
    try:
        from packaging.requirements import Requirement

        required = importlib.metadata.requires("atoll") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        yield Finding("atoll", "not installed", FindingState.MISSING, install(extra))
        return
    for requirement in map(Requirement, required):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "not installed", FindingState.MISSING, install(extra))
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding(requirement.name, found)
        else:
            wanted = f"{found}, but {requirement.specifier} is needed"
            yield Finding(requirement.name, wanted, FindingState.MISSING, install(extra))


def rollout_environment(path: Path) -> Finding:
    """Checks that the interpreter of a run's replicas can import their engine."""
    from atoll.config.load import load

    rollout = load(path).rollout
    interpreter = str(rollout.python or sys.executable)
    module, extra = {"local": ("torch", "cpu"), "sglang": ("sglang", "rollout")}[rollout.engine]
    what = f"engine {rollout.engine}"
    command = [interpreter, "-c", f"import atoll.rollout.generate, {module}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return Finding(what, str(error), FindingState.MISSING, "set rollout.python to an interpreter")
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2]
        advice = f"{interpreter} -m {install(extra)}, or set rollout.python"
        return Finding(what, reason, FindingState.MISSING, advice)
    return Finding(what, f"{interpreter} imports {module}")


def start_of_run(path: Path) -> Iterator[Finding]:
    """What `atoll run` checks before it starts a service."""
    from atoll.cli.launch.preflight import examine
    from atoll.config.errors import ConfigError
    from atoll.config.load import load
    from atoll.runtime.errors import UserError
    from atoll.runtime.gpus import resolve_here

    try:
        config = resolve_here(load(path))
    except (ConfigError, UserError) as error:
        return iter([Finding("placement", str(error), FindingState.MISSING)])
    return examine(config, resume=False)


def chat_templates(path: Path) -> Iterator[Finding]:
    """What agents can expect of a run's model: which messages extend a branch, which open one."""
    from atoll.config.load import load
    from atoll.gateway.templates.chat_format import ChatFormat
    from atoll.gateway.templates.proof import prove, report_lines
    from atoll.runtime.errors import UserError

    config = load(path)
    advice = "only agents need it"
    try:
        report = asyncio.run(prove(ChatFormat.of_section(config.model.path, config.gateway)))
    except UserError as error:
        yield Finding("chat format", str(error), FindingState.WARNING, advice)
        return
    for line in report_lines(report):
        yield Finding("chat format", line)
    for warning in report.warnings:
        yield Finding("chat format", warning, FindingState.WARNING, advice)


def cores(count: int) -> Finding:
    if count < 2:
        advice = "generation and training share one core; a run is about half as fast"
        return Finding("cores", str(count), FindingState.WARNING, advice)
    return Finding("cores", str(count))


def memory(total: int) -> Finding:
    found = f"{total / GIB:.1f} GiB"
    if total < 4 * GIB:
        return Finding("memory", found, FindingState.WARNING, "the quickstart needs about 4 GiB")
    return Finding("memory", found)


def shared_memory() -> Finding:
    """Weights reach the rollout services on this machine through anonymous shared memory."""
    mount = Path("/dev/shm")  # not needed on CPUs; GPU libraries use it
    size = f"{shutil.disk_usage(mount).free / GIB:.1f} GiB free" if mount.is_dir() else "absent"
    try:
        os.close(os.memfd_create("atoll-doctor"))
    except (AttributeError, OSError) as error:
        advice = "requires a Linux that allows memfd_create"
        return Finding("shared memory", str(error), FindingState.MISSING, advice)
    return Finding("shared memory", f"memfd works; {mount} {size}")


async def sandbox() -> Finding:
    """Starts the sandbox that reward services run model-written code in, and attacks it as they do."""
    advice = "needed only by the graders code and data_source, and by tools of agents: see docs/rewards.md"
    try:
        from atoll.cli.doctor_sandbox import refused_calls, remedies
        from atoll.reward.sandbox.host import start_sandbox
        from atoll.runtime.errors import AtollError
    except ImportError as error:
        return Finding("sandbox", str(error), FindingState.WARNING, install())
    try:
        async with start_sandbox(programs=2, namespaces=True) as started:
            tier, refusal = started.tier, started.refusal
    except AtollError as error:
        return Finding("sandbox", str(error), FindingState.WARNING, advice)
    if "namespaces" in tier:
        return Finding("sandbox", tier)
    causes = list(remedies(refused_calls())) or ["allow user namespaces on this machine"]
    advice = "\n".join(["programs have no writable folder; if they need one:", *causes])
    return Finding("sandbox", f"{tier}; no namespaces: {refusal}", FindingState.WARNING, advice)


def git() -> Finding:
    if not shutil.which("git"):
        return Finding("git", "not found", FindingState.WARNING, "only development needs it")
    answer = subprocess.run(["git", "--version"], capture_output=True, text=True, timeout=30)
    return Finding("git", answer.stdout.strip().removeprefix("git version "))


def runs_folder(folder: Path) -> Finding:
    existing = folder if folder.exists() else folder.absolute().parent
    if not os.access(existing, os.W_OK):
        found = f"{existing} is not writable"
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            found, advice = f"{found}: its file system is read-only", "in a container, mount a volume on it"
        else:
            user = os.geteuid()
            found = f"{found} for user {user}: it belongs to user {existing.stat().st_uid}"
            advice = f"chown {user} {existing}, also of a volume that is mounted there"
        return Finding("runs folder", found, FindingState.MISSING, f"start from another folder, or {advice}")
    free = shutil.disk_usage(existing).free
    return Finding("runs folder", f"{folder.absolute()}, {free / GIB:.1f} GiB free on its disk")
