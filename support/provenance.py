"""What made a result: it opens every log and checkpoint, and stands in every bench's record."""

import platform
import subprocess
import sys
from functools import cache

import torch

from support.runtime import ROOT


def provenance() -> dict[str, str]:
    """Command, commit, versions, machine."""
    return {
        "argv": " ".join(sys.argv),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def commit() -> str:
    """The commit of this code, when it is first asked for: a later one is not what runs here."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git here
        found = ""
    return found or "none"
