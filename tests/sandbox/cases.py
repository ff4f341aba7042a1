"""The attacks of all families as programs, and how each is judged."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from atoll.wire.types import Execution, ProgramLimits, ProgramStatus
from tests.sandbox import files, floods, inside, kernel, network, others, preamble, processes

FAMILIES = (processes, files, network, others, kernel, floods, inside)
DISK_BYTES = 2 << 20

_TAIL = """
import json
host = json.load(sys.stdin)
try:
    evidence = {name}(host)
except (OSError, MemoryError) as error:
    evidence = None
sys.stdout.write(f"ESCAPED: {{evidence!r:.300}}\\n" if evidence else "stopped\\n")
"""


@dataclass(frozen=True)
class Case:
    name: str  # "family.attack"
    source: str
    ends: frozenset[ProgramStatus] | None  # None: refused, or killed for a system call

    @property
    def limits(self) -> ProgramLimits:
        spins = self.ends is not None and ProgramStatus.TIMEOUT in self.ends
        return ProgramLimits(timeout_s=1.0 if spins else 30.0, output_bytes=1 << 18, disk_bytes=DISK_BYTES)

    def contained(self, execution: Execution) -> bool:
        """Fails closed: an unexpected end means that the attack succeeded, or is broken."""
        if b"ESCAPED" in execution.stdout + execution.stderr:
            return False
        if self.ends is not None:
            return execution.status in self.ends
        refused = execution.status is ProgramStatus.OK and execution.stdout.endswith(b"stopped\n")
        return refused or (execution.status is ProgramStatus.SIGNAL and execution.detail == "SIGSYS")


def _cases(family: ModuleType) -> Iterator[Case]:
    head = inspect.getsource(preamble)
    for name, function in inspect.getmembers(family, inspect.isfunction):
        if function.__module__ != family.__name__:
            continue
        imports = _imports(family)
        source = f"{head}\n{imports}\n{inspect.getsource(function)}\n{_TAIL.format(name=name)}"
        ends = family.ENDS.get(name)
        yield Case(f"{family.__name__.split('.')[-1]}.{name}", source, frozenset(ends) if ends else None)


def _imports(family: ModuleType) -> str:
    """Of the standard library: the rest is the preamble's, or not for the program."""
    lines = inspect.getsource(family).splitlines()
    return "\n".join(
        line
        for line in lines
        if line.startswith(("import ", "from ")) and " tests." not in line and " atoll." not in line
    )


CASES = tuple(case for family in FAMILIES for case in sorted(_cases(family), key=lambda case: case.name))
