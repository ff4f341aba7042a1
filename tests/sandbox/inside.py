"""Tricks within the program's own process, against the code that reports its end and the state that the next
program starts from."""

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import libc

ENDS = {
    "exit_by_signal": {ProgramStatus.SIGNAL, ProgramStatus.OK},
    "exit_code": {ProgramStatus.EXIT_CODE},
    "exit_code_of_os": {ProgramStatus.EXIT_CODE},
    "forged_report_on_every_descriptor": {ProgramStatus.EXIT_CODE},
    "forged_report_in_memory": {ProgramStatus.EXIT_CODE},
    "exit_in_atexit": {ProgramStatus.EXIT_CODE},
    "exit_in_a_thread": {ProgramStatus.EXIT_CODE},
    "close_everything": {ProgramStatus.EXIT_CODE},
    "alarm": {ProgramStatus.SIGNAL, ProgramStatus.TIMEOUT},  # the first process of a namespace ignores it
    "broken_exit": {ProgramStatus.EXIT_CODE, ProgramStatus.EXCEPTION},
    "abort_in_c": {ProgramStatus.SIGNAL},
    "faults": {ProgramStatus.SIGNAL},
}


def exit_code(host):
    sys.exit(3)


def exit_code_of_os(host):
    os._exit(7)


def exit_in_atexit(host):
    atexit.register(os._exit, 5)
    sys.exit(0)


def exit_in_a_thread(host):
    threading.Thread(target=os._exit, args=(6,)).start()
    threading.Event().wait(5)


def exit_by_signal(host):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def abort_in_c(host):
    libc.abort()


def alarm(host):
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        signal.pause()


def faults(host):
    faulthandler.enable()
    ctypes.string_at(0)


def forged_report_on_every_descriptor(host):
    # whatever the sandbox's own runner would write at the end of a good run, sent early
    for fd in range(3, 1024):
        for report in (b"\x00" * 64, b'{"status": "ok"}', b"\x02\x00\x00\x00ok", b"0", b"ok\n"):
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
                os.write(fd, report)
    os._exit(9)


def forged_report_in_memory(host):
    # changes every status that the runner of this process may hold before it reports
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "status" in thing:
            thing["status"] = "ok"
    frame = sys._getframe()
    while frame:
        for name in ("code", "status", "detail"):
            if name in frame.f_locals:
                frame.f_locals[name] = 0
        frame = frame.f_back
    sys.exit(4)


def close_everything(host):
    for fd in range(1024):
        with contextlib.suppress(OSError):
            os.close(fd)
    os._exit(8)


def broken_exit(host):
    sys.excepthook = None
    builtins.SystemExit = ValueError
    builtins.BaseException = int
    sys.modules.clear()
    sys.exit(2)


def host_in_memory(host):
    """The memory that a program inherits holds no data of the service."""
    texts = [thing for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple))]
    marker = host["marker"]  # half of the token that the host process holds in memory and environment
    found = [text for things in texts for text in things if isinstance(text, str) and text.startswith(marker)]
    return [text for text in found if len(text) > len(marker)]


def environment(host):
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("PATH", "LANG", "LC_ALL", "HOME", "LC_CTYPE")
    }


def environment_in_c(host):
    block = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    names = []
    position = 0
    while block and block[position]:
        names.append(block[position].split(b"=")[0].decode())
        position += 1
    return set(names) - {"PATH", "LANG", "LC_ALL", "HOME", "LC_CTYPE"}


def stack_of_the_start(host):
    """The initial stack of the interpreter: arguments and environment."""
    start = ctypes.c_void_p.in_dll(libc, "__libc_stack_end").value or 0
    with contextlib.suppress(ValueError):
        return host["marker"].encode() in ctypes.string_at(start, 4096)


def modules_of_the_service(host):
    return [name for name in sys.modules if name.split(".")[0] in ("atoll", "grpc", "pydantic", "numpy")]


def state_left_by_others(host):
    """Run last: whether an earlier program's changes are seen."""
    return hasattr(builtins, "atoll_attack") or hasattr(os, "atoll_attack") or os.listdir(".")


def leave_state(host):
    builtins.atoll_attack = os.atoll_attack = True
    builtins.len = lambda _: 42
    os.environ["ATOLL_ATTACK"] = "1"
    with contextlib.suppress(OSError), open("atoll-attack", "w") as file:
        file.write("left")
    os.umask(0)
    sys.path.insert(0, os.getcwd())
    return ""


def import_hooks(host):
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            os.atoll_attack = True

    sys.meta_path.insert(0, Finder)
    sys.path_hooks.insert(0, lambda _: os._exit(0))
    with contextlib.suppress(Exception):
        import colorsys  # noqa: F401
    return ""


def tracing(host):
    sys.settrace(lambda *_: None)
    sys.setprofile(lambda *_: None)
    threading.settrace(lambda *_: None)
    gc.callbacks.append(lambda *_: None)
    return ""


def print_is_replaced(host):
    builtins.print = lambda *_, **__: None
    sys.stdout = None
    os.write(1, b"stopped\n")
    os._exit(0)
