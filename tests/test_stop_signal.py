"""What a signal does to a run, and a second one."""

import os
import signal
import subprocess
import sys
import time

from support.base.runtime import ROOT
from support.base.stop_signal import TWICE, StopSignal

BUSY = """
import sys
import torch
from support.base.stop_signal import StopSignal
stop = StopSignal(lambda line: print(line, flush=True))
print("ready", flush=True)
torch.linalg.eigvals(torch.randn(4000, 4000))  # one operation of a minute on a core
sys.exit(1)
"""
WRITING = """
from pathlib import Path
from support.base.atomic import atomic_write
from support.base.stop_signal import StopSignal
stop = StopSignal()
for number in range(10**6):
    with atomic_write(Path({file!r})) as out:
        for _ in range(64):
            out.write(bytes([number % 256]) * 65536)
    print(number, flush=True)
"""
ONE = """
import sys, time
from support.base.stop_signal import StopSignal
stop = StopSignal()
print("ready", flush=True)
while not stop.number:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(7)
"""


def started(code: str) -> subprocess.Popen:
    """Run a text of Python in a process of its own, until it says that it is ready."""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


def interrupt(process: subprocess.Popen, *pauses: float) -> int:
    """Send SIGINT, and once more after each pause; the status in which it ends."""
    try:
        process.send_signal(signal.SIGINT)
        for pause in pauses:
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        return process.wait(timeout=10)
    finally:
        process.kill()


def test_a_second_interrupt_quits_in_the_middle_of_an_operation():
    process = started(BUSY)
    assert interrupt(process, TWICE + 0.2) == 130
    assert "interrupt once more to quit at once" in process.stdout.read()


def test_a_second_interrupt_leaves_nothing_half_written(tmp_path):
    file = tmp_path / "file"
    assert interrupt(started(WRITING.format(file=str(file))), TWICE + 0.2) == 130
    assert len(file.read_bytes()) == 64 * 65536 and len(set(file.read_bytes())) == 1


def test_an_interrupt_that_comes_twice_at_once_is_one():
    assert interrupt(started(ONE), 0.05) == 7


def test_signals_go_back_to_whoever_had_them():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.number == signal.SIGTERM
    stop.close()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
