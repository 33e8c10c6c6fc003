"""What a signal does to a run, and a second one."""

import os
import signal
import subprocess
import sys
import time

from support.base.runtime import ROOT
from support.base.stop_signal import TWICE, StopSignal

READY = """
import hashlib, sys, time
from pathlib import Path
from support.base.atomic import atomic_write
from support.base.stop_signal import StopSignal
stop = StopSignal(lambda line: print(line, flush=True))
print("ready", flush=True)
"""
BUSY = """
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # one operation of a minute on a core
sys.exit(1)
"""
WRITING = """
for number in range(10**6):
    with atomic_write(Path({file!r})) as out:
        for _ in range(64):
            out.write(bytes([number % 256]) * 65536)
"""


def interrupt(code: str, pause: float) -> tuple[int, str]:
    """Run Python code in a process and send SIGINT twice; its status and what it prints."""
    command = [sys.executable, "-c", READY + code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=10), process.stdout.read()
    finally:
        process.kill()


def test_a_second_interrupt_quits_in_the_middle_of_an_operation():
    status, printed = interrupt(BUSY, TWICE + 0.2)
    assert status == 130 and "interrupt once more to quit at once" in printed


def test_a_second_interrupt_leaves_nothing_half_written(tmp_path):
    file = tmp_path / "file"
    assert interrupt(WRITING.format(file=str(file)), TWICE + 0.2)[0] == 130
    assert len(file.read_bytes()) == 64 * 65536 and len(set(file.read_bytes())) == 1


def test_an_interrupt_that_comes_twice_at_once_is_one_and_handlers_of_before_come_back():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
        time.sleep(0.05)  # in which a thread would end this process
        assert stop.number == number
    stop.close()
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
