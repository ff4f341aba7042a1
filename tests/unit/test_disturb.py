"""The disturber: what it stops goes on, and its command's exit code is handed on."""

import random
import sys

import pytest

from tests import disturb

# prints nothing and ends with 3 once its child has been stopped and has gone on, which its parent is told of
WATCHES_A_CHILD = """
import os, sys, time
child = os.fork()
if child == 0:
    while True:
        time.sleep(1)
for flag, happened in ((os.WUNTRACED, os.WIFSTOPPED), (os.WCONTINUED, os.WIFCONTINUED)):
    assert happened(os.waitpid(child, flag)[1])
os.kill(child, 9)
os.wait()
sys.exit(3)
"""


def test_a_process_below_the_command_is_stopped_and_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturb, "STOP_S", (0.01, 0.02))
    monkeypatch.setattr(disturb, "PAUSE_S", (0.01, 0.02))
    code, num_stopped = disturb.disturb([sys.executable, "-c", WATCHES_A_CHILD], random.Random(0))
    assert code == 3
    assert num_stopped >= 1
