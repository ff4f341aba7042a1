"""Targets of the attacks: a file, sockets and a process, all open to anyone."""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import psutil
import pytest

from atoll.reward.sandbox import attacks
from tests.sandbox.cases import DISK_BYTES

NAME = "atoll-attack"  # in every name that an attack gives to anything outside
IPC_KEY = 0x41544F4C  # likewise
SHARED_FOLDERS = "/tmp", "/var/tmp", "/dev/shm", "/run", "/dev/mqueue", "/root"
# Half of a token that lies in the secret file and in the host's memory and environment. Attacks know this
# half only: where the whole token shows up in what a program printed, it was read.
MARKER = "atoll-token-"


@dataclass
class Targets:
    folder: Path
    token: str
    user: int
    victim: subprocess.Popen[bytes]
    sockets: dict[str, Any] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)  # sockets that somebody reached

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    def described(self, pids: list[int]) -> bytes:
        """For the standard input of an attack."""
        return json.dumps(
            self.sockets
            | {
                "folder": str(self.folder),
                "secret": str(self.secret),
                "source": attacks.__file__,
                "disk": DISK_BYTES,
                # RLIMIT_NPROC does not bind a root that cannot become another user: that is for the container
                "threads": 5000 if self.user else sys.maxsize,
                "user": self.user,
                "installed": [numpy.__file__, pytest.__file__],
                "marker": MARKER,
                "pids": pids,
            }
        ).encode()

    def damage(self) -> list[str]:
        """What is no longer as it was created."""
        found = [f"{name} was reached" for name in self.heard]
        if not self.secret.exists() or self.secret.read_text() != self.token:
            found.append("the secret file was changed")
        elif self.secret.stat().st_mode & 0o7777 != 0o666:
            found.append("the mode of the secret file was changed")
        if left := {path.name for path in self.folder.iterdir()} - {"secret", "stream.sock", "datagram.sock"}:
            found.append(f"files were left: {left}")
        for folder in SHARED_FOLDERS:
            if os.access(folder, os.R_OK) and (names := [n for n in os.listdir(folder) if NAME in n]):
                found.append(f"files were left in {folder}: {names}")
        for kind in "shm", "sem", "msg":
            lines = Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
            if any(int(line.split()[0]) == IPC_KEY for line in lines):
                found.append(f"System V {kind} was left")
        return found + self._victim_damage()

    def _victim_damage(self) -> list[str]:
        if self.victim.poll() is not None:
            return [f"the other process was ended: {self.victim.returncode}"]
        process = psutil.Process(self.victim.pid)
        if process.status() == psutil.STATUS_STOPPED:
            return ["the other process was stopped"]
        if process.nice() != os.nice(0) or len(process.cpu_affinity()) != len(os.sched_getaffinity(0)):
            return ["the other process was slowed"]
        return []


@contextmanager
def targets(token: str, user: int) -> Iterator[Targets]:
    """`user`: the owner of the other process, so that only the sandbox protects it."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        os.chmod(folder, 0o777)
        victim = subprocess.Popen(["sleep", "infinity"], user=user if os.getuid() == 0 else None)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        made = Targets(Path(folder), token, user, victim)
        made.secret.write_text(token)
        made.secret.chmod(0o666)
        made.sockets = stack.enter_context(_listening(made.folder, made.heard))
        yield made


@contextmanager
def _listening(folder: Path, heard: list[str]) -> Iterator[dict[str, Any]]:
    """Sockets at every kind of address, whose traffic is recorded."""
    abstract = f"{NAME}-{secrets.token_hex(4)}"
    unix, datagram = str(folder / "stream.sock"), str(folder / "datagram.sock")
    places = {
        "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        "unix": (socket.AF_UNIX, socket.SOCK_STREAM, unix),
        "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract}"),
        "datagram": (socket.AF_UNIX, socket.SOCK_DGRAM, datagram),
        "abstract_datagram": (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{abstract}d"),
    }
    loop = asyncio.get_running_loop()
    described: dict[str, Any] = {
        "unix": unix,
        "datagram": datagram,
        "abstract": abstract,
        "abstract_datagram": abstract + "d",
    }
    with ExitStack() as stack:
        for name, (family, kind, address) in places.items():
            end = stack.enter_context(socket.socket(family, kind))
            end.setblocking(False)
            end.bind(address)
            if kind == socket.SOCK_STREAM:
                end.listen()
            loop.add_reader(end, _hear, end, kind, name, heard)
            stack.callback(loop.remove_reader, end)
            if family == socket.AF_INET:
                described[name] = end.getsockname()[1]
        for path in (unix, datagram):
            os.chmod(path, 0o777)
        yield described


def _hear(end: socket.socket, kind: int, name: str, heard: list[str]) -> None:
    if kind == socket.SOCK_STREAM:
        end.accept()[0].close()
    else:
        end.recv(100)
    heard.append(name)
