"""Freed memory stays with the process, where glibc would hand it back.

python -m pytest tests/test_memory.py
"""

import platform
import subprocess
import sys

import pytest

from support.base import runtime
from support.base.runtime import ROOT

FAULTS = """
import resource
import torch
from model import Transformer, TransformerConfig
from support.base.runtime import keep_freed_memory
from support.step.sizes import SIZES

shape = SIZES["nano"]._asdict()
model = Transformer(TransformerConfig("gpt", **shape, mlp_width=512, vocab_size=4160))
batch = (*torch.randint(4160, (2, 8, 256)), None, None)

def step():
    model(batch).backward()
    model.zero_grad(set_to_none=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for change in (lambda: None, keep_freed_memory):
    change()
    seen = [step() for _ in range(4)]
    print(seen[-1] - seen[0])
"""


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_steps_get_the_pages_of_the_steps_before():
    """Faults of three steps after the first, of a process that does not and one that then does."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    left, kept = map(int, done.stdout.split())
    assert left > 7_000, "else there is nothing to mend here"
    assert kept < left / 2


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(runtime.ctypes, "CDLL", None)  # a call would fail
    runtime.keep_freed_memory()
