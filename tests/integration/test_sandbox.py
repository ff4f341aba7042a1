"""The sandbox with harmless programs: how they end, what they can do, and what they leave behind.

Both tiers if namespaces work; hostile programs are in tests/integration/test_sandbox_attacks.py.
"""
# long because all of it shares one started sandbox per tier

import asyncio
import os
import platform
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from atoll.reward.sandbox.base import CHANNEL_FD, MAX_FRAME_BYTES, Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.reward.sandbox.zygote import STILL_S
from atoll.runtime.errors import SandboxError, UserError
from atoll.wire.types import Execution, ProgramLimits, ProgramStatus

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
PROGRAMS = 4
NAMESPACES = "landlock, seccomp, namespaces"
# Answers each frame with `answer(frame)`.
DIALOGUE = f"""
import os, sys

def take(size):
    data = b""
    while len(data) < size:
        piece = os.read({CHANNEL_FD}, size - len(data))
        if not piece:
            sys.exit()
        data += piece
    return data

def give(data):
    while data:
        data = data[os.write({CHANNEL_FD}, data):]

def serve(answer):
    while True:
        reply = answer(take(int.from_bytes(take(4), "little")))
        give(len(reply).to_bytes(4, "little") + reply)
"""


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=[True, False], ids=["namespaces", "without"]
)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with start_sandbox(PROGRAMS, request.param) as started:
        yield started


async def run(sandbox: Sandbox, source: str, stdin: bytes = b"", **limits: float) -> Execution:
    return await sandbox.run(textwrap.dedent(source), stdin, replace(ProgramLimits(), **limits))


@pytest.mark.parametrize(
    ("source", "status", "detail"),
    [
        ("print('done')", ProgramStatus.OK, ""),
        ("import sys; sys.exit()", ProgramStatus.OK, ""),
        ("exit(0)", ProgramStatus.OK, ""),
        ("def f(:", ProgramStatus.COMPILE_ERROR, "SyntaxError: invalid syntax (<program>, line 1)"),
        ("x = '\0'", ProgramStatus.COMPILE_ERROR, None),
        ("'\ud800'", ProgramStatus.COMPILE_ERROR, None),
        ("(" * 1000 + ")" * 1000, ProgramStatus.COMPILE_ERROR, None),
        ("1 / 0", ProgramStatus.EXCEPTION, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", ProgramStatus.EXCEPTION, "KeyboardInterrupt"),
        ("def f(): f()\nf()", ProgramStatus.EXCEPTION, "RecursionError: maximum recursion depth exceeded"),
        ("x = bytearray(1 << 32)", ProgramStatus.EXCEPTION, "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(1 << 20))", ProgramStatus.EXCEPTION, "MemoryError"),
        ("import sys; sys.exit(3)", ProgramStatus.EXIT_CODE, "3"),
        ("import sys; sys.exit('no')", ProgramStatus.EXIT_CODE, "1"),
        ("import os; os._exit(7)", ProgramStatus.EXIT_CODE, "7"),
        ("import ctypes; ctypes.string_at(0)", ProgramStatus.SIGNAL, "SIGSEGV"),
        pytest.param(
            "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)",
            ProgramStatus.SIGNAL,
            "SIGSYS",
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is a part of x86_64"),
        ),
    ],
)
async def test_how_a_program_ends_is_told_apart(
    sandbox: Sandbox, source: str, status: ProgramStatus, detail: str | None
) -> None:
    execution = await run(sandbox, source)
    assert execution.status is status, execution
    if detail is not None:
        assert execution.detail == detail


async def test_what_it_prints_and_reads(sandbox: Sandbox) -> None:
    source = """
        import sys
        print(sys.stdin.read().upper(), end="é")
        print("trouble", file=sys.stderr)
        keep, sys.stdout = sys.stdout, open("/dev/null", "w")
        print("nobody sees this")
    """
    execution = await run(sandbox, source, "größe\n".encode())
    assert (execution.stdout, execution.stderr) == ("GRÖSSE\né".encode(), b"trouble\n")
    data = bytes(range(256)) * 3000  # more than a pipe holds, in both directions
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert (await run(sandbox, echo, data)).stdout == data
    # an end without the interpreter's shutdown loses unwritten output, as it does anywhere
    assert (await run(sandbox, "import os; print('lost'); os._exit(0)")).stdout == b""


async def test_it_is_forked_from_a_process_without_torch(sandbox: Sandbox) -> None:
    """One that has initialized CUDA could not fork users of it."""
    loaded = await run(sandbox, "import sys; print('torch' in sys.modules)")
    assert loaded.stdout == b"False\n"


async def test_a_traceback_shows_the_program_and_nothing_of_ours(sandbox: Sandbox) -> None:
    execution = await run(sandbox, "def halve(x):\n    return x / 0\nhalve(1)")
    assert execution.stderr.decode() == (
        "Traceback (most recent call last):\n"
        '  File "<program>", line 3, in <module>\n'
        "    halve(1)\n"
        '  File "<program>", line 2, in halve\n'
        "    return x / 0\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )


async def test_an_exception_cannot_say_how_the_program_ended(sandbox: Sandbox) -> None:
    forged = "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E"
    execution = await run(sandbox, forged)
    assert (execution.status, execution.detail) == (ProgramStatus.EXCEPTION, "E")
    report = (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\0ok')\n    except OSError: pass\n1 / 0"
    )
    assert (await run(sandbox, report)).status in (ProgramStatus.EXCEPTION, ProgramStatus.EXIT_CODE)


async def test_the_standard_library_is_there_and_nothing_else(sandbox: Sandbox) -> None:
    source = """
        import asyncio, ctypes, decimal, hashlib, os, pickle, re, sqlite3, ssl, sys, tempfile, threading
        import xml.etree.ElementTree, wsgiref  # not imported before
        async def double(x):
            await asyncio.sleep(0.001)
            return 2 * x
        print(asyncio.run(double(21)), __name__, dict(os.environ))
        threading.stack_size(1 << 27)
        thread = threading.Thread(target=lambda: print(hashlib.sha256(b"").hexdigest()[:8]))
        thread.start(); thread.join()
        for name in "numpy", "pip", "atoll":
            try: print(__import__(name))
            except ImportError: pass
    """
    execution = await run(sandbox, source)
    assert execution.status is ProgramStatus.OK, execution
    assert execution.stdout.decode().replace("{'LC_CTYPE': 'C.UTF-8'}", "{}") == "42 __main__ {}\ne3b0c442\n"


async def test_a_directory_of_its_own_with_namespaces_and_none_without(sandbox: Sandbox) -> None:
    source = """
        import os
        print(os.listdir("."))
        with open("file", "wb") as file:
            print(file.write(bytes(1 << 19)))
        with open("file", "ab", buffering=0) as file:
            while file.write(bytes(1 << 16)) == 1 << 16: pass
    """
    for _ in range(2):  # the second one does not find the first one's file
        execution = await run(sandbox, source, disk_bytes=1 << 20)
        assert execution.status is ProgramStatus.EXCEPTION
        if sandbox.tier == NAMESPACES:
            assert execution.stdout == b"[]\n524288\n"
            assert "No space left" in execution.detail or "File too large" in execution.detail
        else:
            assert execution.stdout == b""
            assert "PermissionError" in execution.detail
    execution = await run(sandbox, "open('file', 'w').write('x')", disk_bytes=0)
    assert execution.status is ProgramStatus.EXCEPTION


async def test_the_deadline_whatever_is_ignored(sandbox: Sandbox) -> None:
    source = """
        import os, signal, time
        for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        print("begun", flush=True)
        os.close(2); os.close(4)
        while True:
            try: %s
            except BaseException: pass
    """
    for what in "pass", "time.sleep(100)":
        execution = await run(sandbox, source % what, timeout_s=2.0)
        assert (execution.status, execution.detail) == (ProgramStatus.TIMEOUT, "after 2 s")
        assert execution.stdout == b"begun\n"
        assert 2.0 <= execution.wall_s < 10.0
    assert execution.cpu_s < 1.0  # it slept
    late = "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()"
    assert (await run(sandbox, late, timeout_s=0.3)).status is ProgramStatus.TIMEOUT
    printing = "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"
    assert (await run(sandbox, printing, timeout_s=0.3)).status is ProgramStatus.TIMEOUT


async def test_cpu_time_is_counted_also_that_of_threads(sandbox: Sandbox) -> None:
    source = """
        import hashlib, threading, time
        start = time.process_time()
        def burn():  # without the interpreter's lock
            while time.process_time() - start < 0.6:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)
        threads = [threading.Thread(target=burn) for _ in range(4)]
        for thread in threads: thread.start()
    """
    execution = await run(sandbox, source, timeout_s=20.0)
    assert execution.status is ProgramStatus.OK
    assert 0.6 <= execution.cpu_s < 2.0  # not four times as much


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_is_cut_off_at_its_limit(sandbox: Sandbox, stream: str) -> None:
    flood = f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"
    execution = await run(sandbox, flood, output_bytes=5000)
    assert (execution.status, execution.detail) == (ProgramStatus.OUTPUT_LIMIT, "more than 5000 bytes")
    assert getattr(execution, stream) == b"x" * 5000
    just = await run(sandbox, f"import sys\nsys.{stream}.write('x' * 5000)", output_bytes=5000)
    assert just.status is ProgramStatus.OK
    assert getattr(just, stream) == b"x" * 5000
    more = await run(sandbox, f"import sys\nsys.{stream}.write('x' * 5001)", output_bytes=5000)
    assert more.status is ProgramStatus.OUTPUT_LIMIT  # although it had ended by itself


async def test_a_dialogue(sandbox: Sandbox) -> None:
    async with sandbox.open(DIALOGUE + "serve(bytes.upper)", ProgramLimits()) as dialogue:
        assert await dialogue.ask(b"hello") == b"HELLO"
        assert await dialogue.ask(b"") == b""
        large = b"ab" * (MAX_FRAME_BYTES // 2)
        assert await dialogue.ask(large) == large.upper()
        execution = await dialogue.end()
    assert (execution.status, execution.detail) == (ProgramStatus.OK, "ended by the host")


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        ("sys.exit(5)", ProgramStatus.EXIT_CODE, "5"),
        ("1 / 0", ProgramStatus.EXCEPTION, "ZeroDivisionError: division by zero"),
        ("time.sleep(100)", ProgramStatus.TIMEOUT, "after 1 s"),
        ("give(b'xx') or sys.exit()", ProgramStatus.OK, ""),  # half a length
        ("give(b'\\4\\0\\0\\0xx') or sys.exit()", ProgramStatus.OK, ""),  # half a frame
        (
            "give(b'\\377\\377\\377\\377') or time.sleep(100)",
            ProgramStatus.OUTPUT_LIMIT,
            f"a frame of {(1 << 32) - 1} bytes, at most 4194304",
        ),
        ("os.close(3) or time.sleep(100)", ProgramStatus.OK, "ended by the host"),
    ],
)
async def test_a_dialogue_without_an_answer(
    sandbox: Sandbox, answer: str, status: ProgramStatus, detail: str
) -> None:
    source = f"{DIALOGUE}import time\nserve(lambda frame: {answer})"
    limits = ProgramLimits(timeout_s=1.0 if status is ProgramStatus.TIMEOUT else 30.0)
    async with sandbox.open(source, limits) as dialogue:
        assert await dialogue.ask(b"hello") is None
        assert await dialogue.ask(b"again") is None
        execution = await dialogue.end()
    assert (execution.status, execution.detail) == (status, detail)


async def test_a_program_that_reads_nothing_does_not_hold_up_who_asks(sandbox: Sandbox) -> None:
    async with sandbox.open("import time; time.sleep(100)", ProgramLimits(timeout_s=0.5)) as dialogue:
        assert await dialogue.ask(bytes(MAX_FRAME_BYTES)) is None
        assert (await dialogue.end()).status is ProgramStatus.TIMEOUT


async def test_leaving_or_giving_up_ends_the_program(sandbox: Sandbox) -> None:
    async with sandbox.open("while True: pass", ProgramLimits(timeout_s=600.0)):
        pass
    task = asyncio.create_task(run(sandbox, "while True: pass", timeout_s=600.0))
    await _until(lambda: len(_programs()) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not _programs()


async def test_no_more_than_so_many_at_once(sandbox: Sandbox) -> None:
    busy = "import time\nend = time.monotonic() + 0.4\nwhile time.monotonic() < end: time.sleep(0.005)"
    tasks = [asyncio.create_task(run(sandbox, busy)) for _ in range(2 * PROGRAMS)]
    await _until(lambda: len(_programs()) == PROGRAMS)
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, len(_programs()))
        await asyncio.wait(tasks, timeout=0.02)
    assert most == PROGRAMS
    assert {task.result().status for task in tasks} == {ProgramStatus.OK}


async def test_programs_that_sleep_or_spin_step_aside(sandbox: Sandbox) -> None:
    """If such programs occupied all slots for 20 s, others would have to wait for the first one to end."""
    hang = ["import time; time.sleep(100)", "while True: pass"] * (PROGRAMS // 2)
    tasks = [asyncio.create_task(run(sandbox, source, timeout_s=20.0)) for source in hang]
    await _until(lambda: len(_programs()) == PROGRAMS)
    executions = await asyncio.wait_for(asyncio.gather(*(run(sandbox, "print(1)") for _ in range(20))), 10.0)
    assert {execution.stdout for execution in executions} == {b"1\n"}
    behind = [min(os.nice(0) + 5, 19)] * (PROGRAMS // 2) + [19] * (PROGRAMS // 2)
    await _until(lambda: sorted(program.nice() for program in _programs()) == behind)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not _programs()


async def test_programs_do_not_see_each_other(sandbox: Sandbox) -> None:
    other = asyncio.create_task(
        run(
            sandbox,
            f"import os, time; open('note', 'w') if {sandbox.tier == NAMESPACES} else 0; time.sleep(1)",
        )
    )
    await _until(lambda: len(_programs()) == 1)
    source = "import os; print(os.getpid(), os.path.exists('note'), os.path.exists('/proc/self'))"
    pid, *rest = (await run(sandbox, source)).stdout.split()
    assert (await other).status is ProgramStatus.OK
    if sandbox.tier == NAMESPACES:
        assert (pid, rest) == (b"1", [b"False", b"False"])


@pytest.mark.parametrize("tier", ["namespaces", "without"])
async def test_two_thousand_runs_leave_nothing(tier: str) -> None:
    command = [sys.executable, "-m", "tests.sandbox.leftovers", tier]
    process = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600
    )
    assert (process.returncode, process.stdout) == (0, "")


async def test_a_zygote_that_dies_is_an_error_and_the_next_run_works(sandbox: Sandbox) -> None:
    tasks = [asyncio.create_task(run(sandbox, "while True: pass", timeout_s=60.0)) for _ in range(PROGRAMS)]
    await _until(lambda: len(_programs()) == PROGRAMS)
    programs = _programs()
    for zygote in _zygotes():
        zygote.kill()
    for task in tasks:
        with pytest.raises(SandboxError, match="zygote exited"):
            await task
    _, alive = await asyncio.to_thread(psutil.wait_procs, programs, 10.0)
    assert not alive
    assert (await run(sandbox, "print(1)")).stdout == b"1\n"


async def test_a_program_that_something_else_kills_is_an_error(sandbox: Sandbox) -> None:
    task = asyncio.create_task(run(sandbox, "while True: pass", timeout_s=60.0))
    # a program with that much CPU time is confined and running
    await _until(lambda: any(program.cpu_times().user > 0.2 for program in _programs()))
    _programs()[0].kill()
    with pytest.raises(SandboxError, match="killed from outside"):
        await task


async def test_a_dialogue_that_something_else_ends_is_an_error(sandbox: Sandbox) -> None:
    """Not the end of a program without an answer, which would be graded."""
    source = f"{DIALOGUE}import time\nserve(lambda frame: time.sleep(100))"
    async with sandbox.open(source, ProgramLimits(timeout_s=60.0)) as dialogue:
        (program,) = _programs()
        asyncio.get_running_loop().call_later(0.2, program.kill)
        assert await dialogue.ask(b"hello") is None
        with pytest.raises(SandboxError, match="killed from outside"):
            await dialogue.end()


async def test_a_zygote_and_its_programs_that_stand_still_are_an_error(sandbox: Sandbox) -> None:
    """As under `docker pause`. The program has not had the time that its deadline assumes."""
    task = asyncio.create_task(run(sandbox, "while True: pass", timeout_s=1.0))
    await _until(lambda: len(_programs()) == 1)
    paused = [process for zygote in _zygotes() for process in (zygote, *zygote.children(recursive=True))]
    for process in paused:
        process.suspend()
    await asyncio.sleep(STILL_S + 0.5)  # the deadline passes, too
    for process in paused:
        with suppress(psutil.NoSuchProcess):  # the zygote has ended, and its program with it
            process.resume()
    with pytest.raises(SandboxError, match="zygote exited"):
        await task


@pytest.mark.parametrize(("namespaces", "stopped"), [(True, False), (False, False), (True, True)])
async def test_a_service_that_is_killed_takes_all_with_it(
    namespaces: bool, stopped: bool, tmp_path: Path
) -> None:
    script = f"""
import asyncio
from atoll.reward.sandbox.host import start_sandbox
from atoll.wire.types import ProgramLimits

async def main():
    async with start_sandbox(2, {namespaces}) as sandbox:
        async with sandbox.open("while True: pass", ProgramLimits(timeout_s=600.0)):
            print("running", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as service:  # noqa: ASYNC220
        assert service.stdout is not None
        assert await asyncio.to_thread(service.stdout.readline) == b"running\n"
        others = psutil.Process(service.pid).children(recursive=True)
        assert len(others) == (5 if namespaces else 3)  # two zygotes with their parents, and a program
        for process in others * stopped:
            process.suspend()
        service.send_signal(signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, others, 10.0)
    assert not alive


async def test_an_interpreter_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\n")  # not executable
    with pytest.raises(UserError, match=r"cannot start .*/python, .*\(chmod o\+x\)"):
        async with start_sandbox(1, False, str(interpreter)):
            pass


def _zygotes() -> list[psutil.Process]:
    """Other tests may have left children, such as multiprocessing's resource tracker."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if child.cmdline()[1:4] == ["-I", "-S", "-c"]:
                found.append(child)
    return found


def _programs() -> list[psutil.Process]:
    """Descendants of the zygotes that are session leaders."""
    found = []
    for process in (below for zygote in _zygotes() for below in zygote.children(recursive=True)):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has ended since
            if os.getsid(process.pid) == process.pid:
                found.append(process)
    return found


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
