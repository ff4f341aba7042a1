"""The sandbox under a seccomp filter like that of a container: it refuses the calls that make namespaces."""

import platform
import subprocess
import sys

DENIED = {"x86_64": (155, 165, 166, 272, 308), "aarch64": (39, 40, 41, 97, 268)}[platform.machine()]
# Loads the call's number; EPERM for those, and all others pass
SCRIPT = """
import asyncio, struct, sys
from atoll.cli.doctor import sandbox
from atoll.reward.sandbox import kernel
denied = [line for word in sys.argv[1:] for line in ((0x15, 0, 1, int(word)), (0x06, 0, 0, 0x00050001))]
lines = [(0x20, 0, 0, 0), *denied, (0x06, 0, 0, 0x7FFF0000)]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.filter_system_calls(b"".join(struct.pack("HBBI", *line) for line in lines))
finding = asyncio.run(sandbox())
print(finding.found, finding.advice, sep="\\n")
"""


def test_it_starts_without_namespaces_and_names_the_profile_that_gives_them() -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, DENIED)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found, _, *remedies = answer.stdout.splitlines()
    assert found.startswith("landlock, seccomp; no namespaces: ")
    assert "unshare: Operation not permitted" in found
    assert (
        "a seccomp profile forbids unshare, setns, mount, umount2: for containers of reward services, set "
        'security_opt: ["seccomp=deploy/compose/reward-seccomp.json"]'
    ) in remedies
