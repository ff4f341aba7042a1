"""Zygote and program processes on the host side: descriptors, deadlines, exits.

Nothing here waits indefinitely for a program or a zygote: a program past its deadline is killed, and a zygote
that does not report its end within KILL_S is killed itself, with all its programs.
"""

import asyncio
import inspect
import itertools
import math
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from typing import Self

from atoll.reward.sandbox import kernel, landlock, namespaces, program, zygote
from atoll.reward.sandbox.base import MAX_FRAME_BYTES
from atoll.runtime.errors import SandboxError
from atoll.wire.types import Execution, ProgramLimits, ProgramStatus

START_S = 30.0  # for a zygote
SETUP_S = 20.0  # between an order and the start of its program
KILL_S = 10.0  # for an end to be reported
END_S = 1.0  # for the end of a zygote, or of a program that has closed its channel
_READ_BYTES = 1 << 16
_REPORT_BYTES = 4096
_LENGTH = struct.Struct("<I")

# What a zygote runs first. It gets its modules as source, since its user may not be able to read this
# package's files.
_BOOT = """
import sys, types
for name, source in {sources!r}:
    parent, _, short = name.rpartition(".")
    module = sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules.setdefault(parent, types.ModuleType(parent)), short, module)
    exec(compile(source, name, "exec"), module.__dict__)
module.main({socket}, {namespaces}, {calls!r})
"""
_PARTS = (kernel, landlock, namespaces, program, zygote)


@dataclass(frozen=True, slots=True)
class ZygoteSettings:
    interpreter: str
    user: int | None  # user and group id to switch to; None: those of this process
    namespaces: bool
    calls: bytes  # the seccomp filter


class ZygoteProcess:
    """Its socket has one reader, the event loop, which reports each end to the waiting ProgramProcess."""

    def __init__(self, process: subprocess.Popen[bytes], wire: socket.socket) -> None:
        self._process, self._wire = process, wire
        self._runs: dict[int, tuple[asyncio.Future[tuple[int, float]], Callable[[bool], None]]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(wire, self._read)
        self.is_alive = True

    @classmethod
    async def start(cls, settings: ZygoteSettings) -> Self:
        """Raises SandboxError with the zygote's message if it cannot work here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sources = [(part.__name__, inspect.getsource(part)) for part in _PARTS]
            boot = _BOOT.format(
                sources=sources, socket=theirs.fileno(), namespaces=settings.namespaces, calls=settings.calls
            )
            # not in a thread of a pool: a zygote is killed when the thread that started it ends
            process = _spawn(settings, boot, theirs.fileno())
        ours.setblocking(False)
        said = b""
        try:
            async with asyncio.timeout(START_S):
                said = await asyncio.get_running_loop().sock_recv(ours, _REPORT_BYTES)
        except TimeoutError:
            said = f"nothing within {START_S:.0f} s".encode()
        finally:
            if said != zygote.READY:  # or cancelled
                process.kill()
                process.wait()
                ours.close()
        if said != zygote.READY:
            raise SandboxError(f"the sandbox zygote did not start:  {said.decode()!r}")
        return cls(process, ours)

    @property
    def num_programs(self) -> int:
        return len(self._runs)

    def order(
        self, limits: ProgramLimits, descriptors: list[int], park: Callable[[bool], None]
    ) -> tuple[int, asyncio.Future[tuple[int, float]]]:
        """Starts a program. Returns its number, and its wait status and CPU seconds once it is gone;
        SandboxError if the zygote is gone first. Calls `park` at most once before that. Raises OSError if the
        zygote is already gone."""
        run, end = next(self._numbers), self._loop.create_future()
        limit = zygote.ORDER.pack(run, False, limits.memory_bytes, limits.disk_bytes, cpu_limit_s(limits))
        try:
            socket.send_fds(self._wire, [limit], descriptors)
        except OSError:
            self.close()
            raise
        self._runs[run] = end, park
        return run, end

    def kill(self, run: int) -> None:
        """Kills the program if it runs; if its end is not reported soon, kills the zygote."""
        if run in self._runs:
            try:
                self._wire.send(zygote.ORDER.pack(run, True, 0, 0, 0))
            except OSError:
                self.close()
            else:
                self._loop.call_later(KILL_S, self._give_up, run)

    def _give_up(self, run: int) -> None:
        if run in self._runs:
            self.close()

    def close(self) -> None:
        """Kills it and all of its programs."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._wire)
        self._wire.close()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP)
            self._process.kill()
            self._process.wait()
        runs, self._runs = self._runs, {}
        for end, _ in runs.values():
            if not end.done():
                end.set_exception(SandboxError("the sandbox zygote exited, and this program with it"))

    def _read(self) -> None:
        try:
            message = self._wire.recv(zygote.REPORT.size)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.close()
            return
        run, has_ended, status, cpu_s = zygote.REPORT.unpack(message)
        end, park = self._runs[run]
        if not has_ended:
            park(bool(status))
            return
        del self._runs[run]
        if not end.done():
            end.set_result((status, cpu_s))


def _spawn(settings: ZygoteSettings, boot: str, wire: int) -> subprocess.Popen[bytes]:
    groups: list[int] | None = None if settings.user is None else []
    return subprocess.Popen(
        [settings.interpreter, "-I", "-S", "-c", boot],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[wire],
        cwd="/",
        env={},
        start_new_session=True,  # an interrupt from the terminal is meant for the service
        user=settings.user,
        group=settings.user,
        extra_groups=groups,
    )


def cpu_limit_s(limits: ProgramLimits) -> int:
    """Threads can use more CPU time than wall time."""
    return math.ceil(limits.timeout_s) + 1


class ProgramProcess:
    """Implements Dialogue. The event loop reads its output and watches its deadline; everything is released
    when its end is reported, whether or not anyone waits for it."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        source: str,
        stdin: bytes,
        limits: ProgramLimits,
        talks: bool,
        park: Callable[[bool], None],
    ) -> None:
        """`talks`: it has a channel. `park` is called if it sleeps (True) or has used up its share (False).
        Raises SandboxError if this process has run out of descriptors, or the zygote is gone."""
        self._zygote, self._limits = zygote, limits
        self._loop = asyncio.get_running_loop()
        self._killed_for: tuple[ProgramStatus, str] | None = None
        self._started, self._cleared = asyncio.Event(), asyncio.Event()
        self._started_at = self._ended_at = self._loop.time()
        self._captured: list[_CapturedOutput] = []
        self._channel: socket.socket | None = None
        self._has_left = False  # the channel
        theirs: list[int] = []  # in the order of program.Order
        try:
            theirs.append(_seal(source.encode(errors="surrogatepass")))
            self._report = self._capture(theirs, _REPORT_BYTES)
            theirs.append(_seal(stdin))
            self._stdout = self._capture(theirs, limits.output_bytes)
            self._stderr = self._capture(theirs, limits.output_bytes)
            if talks:
                self._channel, their_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                self._channel.setblocking(False)
                theirs.append(their_end.detach())
            self._run, self._end = zygote.order(limits, theirs, park)
        except OSError as error:
            for captured in self._captured:
                captured.close()
            if self._channel is not None:
                self._channel.close()
            raise SandboxError(f"a program cannot be started: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._timer = self._loop.call_later(SETUP_S, zygote.close)
        self._end.add_done_callback(self._clear)

    async def wait_started(self) -> None:
        """Waits for the start. Raises SandboxError if it fails."""
        await self._started.wait()
        if not self._report.data.startswith(program.STARTED):
            await self.wait_ended()

    async def wait_ended(self) -> Execution:
        """Waits for it to end, by itself or at a limit. Raises SandboxError if it never started or ended for
        another reason.
        """
        await self._cleared.wait()  # the future is done a moment earlier
        status, cpu_s = self._end.result()
        how, detail = self._judge(status, cpu_s)
        most, wall_s = self._limits.output_bytes, self._ended_at - self._started_at
        stdout, stderr = bytes(self._stdout.data[:most]), bytes(self._stderr.data[:most])
        return Execution(how, detail, stdout, stderr, wall_s, cpu_s)

    async def end(self) -> Execution:
        if self._has_left and self._killed_for is None:
            # a channel closes a moment before the zygote reports why: wait, so as not to take it for our kill
            await asyncio.wait([self._end], timeout=END_S)
        self._kill(ProgramStatus.OK, "ended by the host")
        return await self.wait_ended()

    async def ask(self, frame: bytes) -> bytes | None:
        assert self._channel is not None
        try:
            await self._loop.sock_sendall(self._channel, _LENGTH.pack(len(frame)) + frame)
            (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
            if length <= MAX_FRAME_BYTES:
                return await self._receive(length)
        except (OSError, EOFError):  # its end of the channel is closed
            self._has_left = True
            return None
        self._kill(ProgramStatus.OUTPUT_LIMIT, f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
        return None

    async def terminate(self) -> None:
        """Ends it if it still runs, and waits for its end. Never raises, and returns even if no end is
        reported."""
        self._kill(ProgramStatus.OK, "ended by the host")
        try:
            await asyncio.wait([self._end], timeout=KILL_S + END_S)
        finally:
            if self._channel is not None:
                self._channel.close()

    async def _receive(self, length: int) -> bytes:
        assert self._channel is not None
        data = bytearray()
        while len(data) < length:
            piece = await self._loop.sock_recv(self._channel, min(length - len(data), _READ_BYTES))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _capture(self, theirs: list[int], most: int) -> "_CapturedOutput":
        captured, writer = _CapturedOutput.pipe(self._loop, most, self._read)
        self._captured.append(captured)
        theirs.append(writer)
        return captured

    def _read(self, captured: "_CapturedOutput") -> None:
        captured.read()
        if captured is not self._report:
            if captured.is_full:
                self._kill(ProgramStatus.OUTPUT_LIMIT, f"more than {self._limits.output_bytes} bytes")
        elif captured.data.startswith(program.STARTED) and not self._started.is_set():
            self._timer.cancel()
            self._started_at = self._loop.time()
            timeout = ProgramStatus.TIMEOUT, f"after {self._limits.timeout_s:g} s"
            self._timer = self._loop.call_later(self._limits.timeout_s, self._kill, *timeout)
            self._started.set()

    def _kill(self, status: ProgramStatus, detail: str) -> None:
        if self._killed_for is None and not self._end.done():
            self._killed_for = status, detail
            self._zygote.kill(self._run)

    def _clear(self, end: asyncio.Future[tuple[int, float]]) -> None:
        self._ended_at = self._loop.time()
        self._cleared.set()
        self._timer.cancel()
        for captured in self._captured:
            captured.close()
        self._started.set()
        end.exception()  # retrieved, in case nobody asks

    def _judge(self, status: int, cpu_s: float) -> tuple[ProgramStatus, str]:
        report = self._report.data.decode(errors="replace")
        if not self._report.data.startswith(program.STARTED):
            raise SandboxError(f"the program was not started: {report or f'wait status {status}'}")
        if self._stdout.is_full or self._stderr.is_full:
            return ProgramStatus.OUTPUT_LIMIT, f"more than {self._limits.output_bytes} bytes"
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            if self._killed_for is not None:
                return self._killed_for
            if cpu_s > cpu_limit_s(self._limits) - 0.5:  # the kernel checks once per tick
                return ProgramStatus.TIMEOUT, f"after {cpu_s:.1f} s of CPU time"
            # a program cannot send it itself
            raise SandboxError(
                "the program was killed from outside: is the machine, or its cgroup, out of memory?"
            )
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return ProgramStatus.SIGNAL, names.get(-code, str(-code))
        if code == 0:
            return ProgramStatus.OK, ""
        how, _, detail = report[len(program.STARTED) :].partition("\n")
        if code == 1 and how in (ProgramStatus.COMPILE_ERROR.value, ProgramStatus.EXCEPTION.value):
            return ProgramStatus(how), detail
        return ProgramStatus.EXIT_CODE, str(code)


class _CapturedOutput:
    """Output read from a pipe; keeps up to one byte more than `most`, to detect excess."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int, descriptor: int) -> None:
        self.data = bytearray()
        self._loop, self._most, self._descriptor = loop, most, descriptor

    @classmethod
    def pipe(
        cls, loop: asyncio.AbstractEventLoop, most: int, when_ready: Callable[["_CapturedOutput"], None]
    ) -> tuple["_CapturedOutput", int]:
        """Returns itself and the descriptor to write to."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        captured = cls(loop, most, reader)
        loop.add_reader(reader, when_ready, captured)
        return captured, writer

    @property
    def is_full(self) -> bool:
        return len(self.data) > self._most

    def read(self) -> bool:
        """Returns whether there may be more."""
        try:
            piece = os.read(self._descriptor, min(_READ_BYTES, self._most + 1 - len(self.data)))
        except BlockingIOError:
            return False
        self.data += piece
        if not piece:
            self._loop.remove_reader(self._descriptor)
        return bool(piece)

    def close(self) -> None:
        """Reads what is left in the pipe first. Call it once nobody writes any more."""
        while self.read():
            pass
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)


def _seal(data: bytes) -> int:
    """A descriptor of a sealed (immutable) file in memory, positioned at its start."""
    descriptor = os.memfd_create("atoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
    return descriptor
