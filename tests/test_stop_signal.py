"""What a signal does to a run, and a second one."""

import os
import signal
import subprocess
import sys
import time

from support.base.runtime import ROOT
from support.base.stop_signal import TWICE, StopSignal

BUSY = """
import hashlib, sys, threading
from pathlib import Path
from support.base.atomic import atomic_write
from support.base.stop_signal import StopSignal
stop = StopSignal(lambda line: print(line, flush=True))

def write():
    for number in range(10**6):
        with atomic_write(Path(sys.argv[1])) as out:
            for _ in range(64):
                out.write(bytes([number % 256]) * 65536)

threading.Thread(target=write, daemon=True).start()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # one operation of a minute on a core
sys.exit(1)
"""


def test_a_second_interrupt_quits_in_the_middle_of_an_operation_and_leaves_nothing_half_written(
    tmp_path,
):
    command = [sys.executable, "-c", BUSY, str(tmp_path / "file")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        time.sleep(TWICE + 0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert "interrupt once more to quit at once" in process.stdout.read()
    finally:
        process.kill()
    content = (tmp_path / "file").read_bytes()
    assert len(content) == 64 * 65536 and len(set(content)) == 1


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
