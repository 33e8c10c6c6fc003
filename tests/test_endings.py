"""How a run of several processes ends: what each rank says, and what torchrun makes of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.base.runtime import ROOT, exit_cleanly, start

pytestmark = pytest.mark.dist
# What ranks 0 and 1 do, in this order; "wait" is for the other rank, in vain.
MISTAKE = ValueError("--data nowhere:\n no store")
BUG = AttributeError("no such thing")


def end_on(rank: int, does: tuple, port: int, folder: Path) -> None:
    """A rank as torchrun starts it, which writes its stderr into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{rank}.json")
    file = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)

    def main() -> int:
        runtime = start("cpu", "fp32")
        dist.barrier()
        own = does[rank]
        if isinstance(own, Exception):
            raise own
        if own == "wait":
            runtime.gather(0)
            runtime.gather(0)
        if own == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return own

    exit_cleanly(main)


class End:
    """Of a rank: its status, what it printed, and what torchrun will quote."""

    def __init__(self, status: int, folder: Path, rank: int):
        self.status, self.said = status, (folder / f"{rank}.txt").read_text()
        file = folder / f"{rank}.json"
        self.quoted = json.loads(file.read_text())["message"]["message"] if file.exists() else ""


def ends(tmp_path: Path, *does) -> list[End]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    context = torch.multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=end_on, args=(rank, does, store.port, tmp_path)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [End(process.exitcode, tmp_path, rank) for rank, process in enumerate(ranks)]


def test_a_mistake_that_all_ranks_meet_is_said_by_rank_0(tmp_path):
    line = "error: --data nowhere: no store"
    for end, said in zip(ends(tmp_path, MISTAKE, MISTAKE), (f"{line}\n", ""), strict=True):
        assert (end.status, end.said, end.quoted) == (2, said, line)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_mistake_of_one_rank_is_said_by_it_alone(tmp_path, alone):
    does = [MISTAKE, "wait"] if alone == 0 else ["wait", MISTAKE]
    found = ends(tmp_path, *does)
    line = f"error: {'rank 1: ' if alone else ''}--data nowhere: no store"
    assert (found[alone].status, found[alone].said) == (2, f"{line}\n")
    assert (found[1 - alone].status, found[1 - alone].said) == (1, "")
    assert found[0].quoted == found[1].quoted == line


def test_a_bug_of_one_rank_has_one_traceback(tmp_path):
    other, own = ends(tmp_path, "wait", BUG)
    assert own.status == 1 and own.said.count("Traceback") == 1 and str(BUG) in own.said
    assert (other.status, other.said) == (1, "")
    assert own.quoted == other.quoted == "error: rank 1: AttributeError: no such thing"


def test_a_bug_of_all_ranks_has_one_traceback(tmp_path):
    first, second = ends(tmp_path, BUG, BUG)
    assert first.said.count("Traceback") == 1 and second.said == ""
    assert first.quoted == second.quoted == "error: AttributeError: no such thing"


def test_two_ranks_with_a_bug_of_their_own_have_two_tracebacks(tmp_path):
    for end in ends(tmp_path, BUG, KeyError("another")):
        assert end.said.count("Traceback") == 1


def test_a_rank_that_is_killed_is_missed_in_one_line(tmp_path):
    other, killed = ends(tmp_path, "wait", "is killed")
    assert killed.status == -signal.SIGKILL
    assert other.status == 1 and other.said.count("\n") == 1
    assert other.said.startswith("error: another process of the run is gone: ")
    assert not other.quoted, "torchrun knows of the signal"


def test_ranks_that_were_stopped_say_by_what(tmp_path):
    for end in ends(tmp_path, 143, 143):
        assert (end.status, end.said, end.quoted) == (143, "", "stopped by signal 15")
    (tmp_path / "0.json").unlink()
    (tmp_path / "1.json").unlink()
    for end in ends(tmp_path, 0, 0):
        assert (end.status, end.said, end.quoted) == (0, "", "")


SCRIPT = """
from support.base.runtime import exit_cleanly, start

def main():
    runtime = start("cpu", "fp32")
    if runtime.rank == 1:
        raise AttributeError("no such thing")
    runtime.gather(0)

exit_cleanly(main)
"""


def test_torchrun_quotes_the_error_last(tmp_path):
    """What a person reads: torchrun's summary, and how it finds the line, are torch's to change."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    said, summary = done.stderr.split("errors.ChildFailedError: ")
    assert said.count("[rank1]: AttributeError: no such thing\n") == 1 and "[rank0]" not in said
    *_, quoted, border, end = summary.split("\n")
    assert quoted.split(" : ")[1] == "error: rank 1: AttributeError: no such thing"
    assert set(border) == {"="} and not end
    assert done.returncode != 0
