"""Signals in a run: the first is remembered until it can stop; a second SIGINT quits at once.

SIGTERM comes from schedulers, SIGINT from Ctrl-C, SIGHUP from a terminal that closes, SIGUSR1 from
Slurm before the time is over, SIGQUIT from Ctrl-\\. A run under nohup goes on at SIGHUP.

Saves nothing: the train loop reads `number` between two steps and saves.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

TWICE = 0.5  # seconds; a second SIGINT within them repeats the first: some launchers forward it


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


class Stopped(Exception):
    """Some rank was asked to stop; raised on all ranks at the same place."""


class StopSignal:
    """Remembers one of these signals until the step is over; `number` is 0 until one comes.

    A second SIGINT ends the process at once, with status 130. A thread watches for it, because
    Python runs signal handlers only between two operations, and a whole backward pass is one.
    Files written by support/base/atomic.py stay whole.
    """

    def __init__(self, notice: Callable[[str], None] = lambda line: None):
        """`notice` is called, from another thread, with a line for the user at the first SIGINT."""
        self.number = 0
        self.notice = notice
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.wakeup = signal.set_wakeup_fd(self.writer.fileno())
        self.handlers = {
            number: signal.signal(number, self._note)
            for number in STOPPING
            if signal.getsignal(number) != signal.SIG_IGN
        }
        threading.Thread(target=self._watch, daemon=True).start()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number

    def _watch(self) -> None:
        """Read the number of every signal as it comes, whatever the main thread is doing."""
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
        """Restore the signal handlers of before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.writer.close()  # which ends the thread
