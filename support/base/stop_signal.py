"""SIGTERM and SIGINT in a run: the first one is remembered, a second SIGINT quits at once.

Does not save anything: whoever asks `number` between two steps does.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

TWICE = 0.5  # seconds within which a second SIGINT is the first: some launchers send it as well


class Stopped(Exception):
    """Some rank was asked to stop; raised on all of them at the same place."""


class StopSignal:
    """Remembers a SIGTERM or SIGINT until the step is over; `number` is 0 until one comes.

    A second SIGINT ends the process at once, with status 130 and whatever it is computing: Python
    runs a signal's handler only between two operations, and a whole backward pass is one, so a
    thread waits for that. What is written as support/base/atomic.py does it stays whole.
    """

    def __init__(self, notice: Callable[[str], None] = lambda line: None):
        """`notice` is told, from another thread, what a first SIGINT leads to."""
        self.number, self.notice = 0, notice
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.wakeup = signal.set_wakeup_fd(self.writer.fileno())
        self.handlers = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        threading.Thread(target=self._watch, daemon=True).start()

    def _note(self, number: int, _frame: Any) -> None:
        self.number = number

    def _watch(self) -> None:
        """Read the number of every signal as it comes in, whatever the main thread is at."""
        first = math.inf
        while number := self.reader.recv(1):
            if number[0] != signal.SIGINT:
                continue
            if time.monotonic() - first > TWICE:
                os._exit(130)
            if first == math.inf:
                first = time.monotonic()
                self.notice("stopping; interrupt once more to quit at once, without saving")

    def close(self) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.writer.close()  # which ends the thread
