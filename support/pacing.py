"""A value that grows with the clock: the papers' pacing, for lengths, difficulties, kept tokens.

One pure function that imports nothing of ours, so that techniques may share it.
"""

import math


def pace(t: float, over: float, start: int, end: int, degree: float = 1, multiple: int = 1) -> int:
    """Value at progress t of `over`, in any unit: from `start` along a root to `end`.

    Paper:    arXiv 2212.03597; floor((t / T)^(1 / p) (end - start) + start)
    Args:     degree   p: 1 is linear, 2 the square root; above 1 it grows fast at first
              multiple values on the way are rounded down to one of these
    Returns:  a value in start..end, exactly `end` from t = over on
    Deviates: by rounding, DeepSpeed (data_pipeline/curriculum_scheduler.py and
              data_routing/scheduler.py) can fall below `start` and reach `end` late
    Example:  pace(1, 300, 64, 1024, degree=2, multiple=8) == 112, from 119.4;
              pace(27, 49, 1, 50) == 27, from 27.999999999999996: the order of operations is fixed
    """
    if t >= over:
        return end
    value = math.floor((t / over) ** (1 / degree) * (end - start) + start)
    return min(max(value - value % multiple, start), end)
