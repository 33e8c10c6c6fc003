"""Packing windows: samples that were packed together, and how steps take their rows.

A window is a function of the clock at its start, so a run that goes on packs the one that it was in
the middle of again. Nothing is carried over between windows: each sample that a window drew lies in
its rows and in no other's. Does not draw or pack, which is plan.py's: it hands in how.

A step of 8 rows, from windows of 5 and of 6:

    row of its window    0 1 2 3 4 | 0 1 2 3 4 5
    step                 1 1 1 1 1   1 1 1 2 2 2 ...
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from support.clock import Clock


class Window(NamedTuple):
    start: Clock  # its fields of data alone
    rows: Any  # data.Rows
    stage: Any  # curriculum.Stage, which all of its samples were drawn under
    next_sample: int


class Taken(NamedTuple):
    parts: list[Any]  # data.Rows of one window each
    stages: list[Any]  # of these windows
    after: Clock  # where the next rows begin; its counts of tokens are those before


class Windows:
    """The windows of a run, one after the other.

    Args: begin (clock between two windows) -> the clock with what the next one is drawn under
          pack  (that clock's fields of data) -> the window
    """

    def __init__(self, begin: Callable[[Clock], Clock], pack: Callable[[Clock], Window]):
        self.begin, self.pack = begin, pack
        self.last: Window | None = None  # kept, for steps come in order

    def at(self, clock: Clock) -> Window:
        """The window that this clock stands in."""
        start = Clock(
            samples_drawn=clock.samples_drawn,
            stage_start=clock.stage_start,
            window_tokens=clock.window_tokens,
        )
        if self.last is None or self.last.start != start:
            self.last = self.pack(start)
        return self.last

    def take(self, clock: Clock, count: int) -> Taken:
        """The next `count` rows, of as many windows as that takes."""
        parts, stages, at = [], [], clock
        while count:
            if at.window_row == 0:
                at = self.begin(at)
            window = self.at(at)
            stop = min(at.window_row + count, len(window.rows))
            parts.append(window.rows.take(np.arange(at.window_row, stop)))
            stages.append(window.stage)
            count -= stop - at.window_row
            at = at._replace(window_row=stop)
            if stop == len(window.rows):
                at = at._replace(samples_drawn=window.next_sample, window_row=0)
        return Taken(parts, stages, at)
