"""Whether a step runs blocks compiled or not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.triton_here import why_not
from support.base.runtime import Runtime

if TYPE_CHECKING:
    from config import Config


MOST_SHAPES = 16  # compiled by default; each takes some seconds


class Choice(NamedTuple):
    on: bool
    why: str


def choice(settings: "Config", runtime: Runtime, shapes: Sequence["Config"]) -> Choice:
    """Decide whether blocks are compiled.

    Args: shapes from config.shapes
    """
    asked, kind = settings.run.compile, runtime.device.type
    if asked != "auto":
        return Choice(asked == "on", "as asked")
    if kind != "cuda":
        return Choice(False, f"--compile compiles on {kind} too")
    if missing := why_not(kind):  # torch generates a GPU's code in Triton
        return Choice(False, missing)
    if not shapes:
        return Choice(False, "shapes are not known ahead; --compile compiles them as they come")
    if len(shapes) > MOST_SHAPES:
        return Choice(False, f"there are {len(shapes)} shapes; --compile compiles them all")
    return Choice(True, "all shapes are known before the first step")
