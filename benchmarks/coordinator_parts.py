"""The coordinator process, with looks at what its event loop computes: one in 4 ms of CPU time or so.

A look adds the CPU time that the thread took since the last one to the part whose code is innermost on its
stack. `python -m benchmarks.coordinator_parts READINGS --config ...` runs atoll.coordinator so, and
appends a line to the file READINGS ten times a second.
"""

import gc
import json
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from atoll.coordinator.__main__ import main

LOOK_S = 0.001  # of CPU time, or as often as the kernel's clock ticks; a look at an idle loop would wake it
READING_S = 0.1
REST = "gRPC and event loop"
GARBAGE = "garbage collector"  # whoever's work it interrupts
GRPC = "/grpc/"  # in the path of a file: what it does is gRPC's, whoever called it
OWN = "/atoll/"

# File below services/, function, part: the first line of which file and function begin so counts. Files that
# are not here, such as runtime/store.py, work for their caller.
PARTS = (
    ("wire/codec/rewards.py", "decode_verdict", "grading"),
    ("wire/codec/trajectories.py", "decode_trajectories", "decode"),
    ("wire/codec/trajectories.py", "parse_trajectories", "decode"),
    ("runtime/clients/rollout.py", "Arrival", "decode"),
    ("wire/codec/trajectories.py", "_check_", "decode"),
    ("wire/codec/batches.py", "encode_forward_backward", "prepare"),
    ("coordinator/journal/checkpoints.py", "", "checkpoint"),
    ("coordinator/journal/", "", "journal"),
    ("coordinator/rollouts/grading.py", "", "grading"),
    ("coordinator/rewards/rewards.py", "", "grading"),
    ("coordinator/rewards/verdict_sources.py", "", "grading"),
    ("runtime/clients/reward.py", "RewardClient", "grading"),
    ("coordinator/rollouts/groups.py", "PendingGroup.grade", "grading"),
    ("coordinator/rollouts/groups.py", "PendingGroup.request", "dispatch"),
    ("coordinator/rollouts/groups.py", "PendingGroup._request", "dispatch"),
    ("coordinator/rollouts/groups.py", "PendingGroup.work", "dispatch"),
    ("coordinator/rollouts/groups.py", "", "take"),
    ("coordinator/rollouts/group_sources.py", "", "take"),
    ("coordinator/algorithm/filters.py", "", "take"),
    ("coordinator/data/", "", "take"),
    ("coordinator/rollouts/generate_call.py", "Call.accept", "decode"),
    ("coordinator/rollouts/", "", "dispatch"),
    ("coordinator/fleet/replicas.py", "", "dispatch"),
    ("coordinator/fleet/routing.py", "", "dispatch"),
    ("runtime/clients/rollout.py", "RolloutClient.generate", "dispatch"),
    ("runtime/clients/trainer.py", "TrainerClient.publish", "push"),
    ("runtime/clients/trainer.py", "TrainerClient", "prepare"),
    ("runtime/clients/rollout.py", "RolloutClient", "push"),
    ("coordinator/weight_sync/", "", "push"),
    ("coordinator/algorithm/", "", "prepare"),
    ("coordinator/loop.py", "", "prepare"),
    ("coordinator/steps.py", "", "prepare"),
    ("coordinator/learners.py", "", "prepare"),
    ("coordinator/__main__.py", "main", REST),
    ("coordinator/", "", "membership"),
    ("runtime/server.py", "", "membership"),
)


class Looks:
    """CPU seconds of the calling thread, by part and by the part's function; and readings of them."""

    def __init__(self, readings: Path) -> None:
        self._file = readings.open("a")
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._functions: defaultdict[str, float] = defaultdict(float)
        self._known: dict[Any, str | None] = {}  # code -> its part
        self._seen = time.thread_time()
        self._next_reading = 0.0

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, LOOK_S, LOOK_S)
        gc.callbacks.append(self._collect)

    def stop(self) -> None:
        """Before the interpreter ends: it takes its handlers of signals away."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # whose time is not what is looked at
        if phase == "start":
            self._look(signal.SIGPROF, sys._getframe(1))
        else:
            self._count(GARBAGE, f"generation {info['generation']}")

    def _look(self, number: int, frame: FrameType | None) -> None:
        self._count(*self._place(frame))

    def _count(self, part: str, function: str) -> None:
        taken = time.thread_time() - self._seen
        self._cpu[part] += taken
        self._functions[f"{part}: {function}"] += taken
        if time.time() >= self._next_reading:
            self._next_reading = time.time() + READING_S
            self._write()
        self._seen = time.thread_time()  # the look itself is nobody's

    def _place(self, frame: FrameType | None) -> tuple[str, str]:
        """The part at work and the function of ours that is innermost."""
        function = ""
        while frame is not None:
            code = frame.f_code
            if code not in self._known:
                self._known[code] = part_of(code.co_filename, code.co_qualname)
            part = self._known[code]
            if not function and OWN in code.co_filename:
                function = f"{code.co_filename.rpartition(OWN)[2]} {code.co_qualname}"
            if part is not None:
                return part, function
            frame = frame.f_back
        return REST, function

    def _write(self) -> None:
        reading = {
            "time": time.time(),
            "parts": self._cpu,
            "functions": self._functions,
            "other_threads": time.process_time() - time.thread_time(),
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        }
        self._file.write(json.dumps(reading) + "\n")
        self._file.flush()


def part_of(file: str, function: str) -> str | None:
    """None: it works for its caller."""
    if GRPC in file:
        return REST
    _, ours, path = file.rpartition(OWN)
    if not ours:
        return None
    fitting = (part for start, name, part in PARTS if path.startswith(start) and function.startswith(name))
    return next(fitting, None)


if __name__ == "__main__":
    looks = Looks(Path(sys.argv.pop(1)))
    looks.start()
    try:
        main()
    finally:
        looks.stop()
