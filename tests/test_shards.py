"""One task for many items: in as many processes as it takes, which end with their parent."""

import os
import re
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from support.rows import shards
from support.rows.shards import in_processes


def pid_and_square(n):
    return os.getpid(), n * n


def test_one_worker_or_one_item_needs_no_process_of_its_own():
    for items, workers in (([3, 1, 2], 1), ([3], 8)):
        results = list(in_processes(pid_and_square, items, workers))
        assert results == [(n, (os.getpid(), n * n)) for n in items]


@pytest.mark.dist
def test_in_no_more_processes_than_items(monkeypatch):
    started = []

    def recorded(number, **options):
        started.append(number)
        return ProcessPoolExecutor(number, **options)

    monkeypatch.setattr(shards, "ProcessPoolExecutor", recorded)
    results = list(in_processes(pid_and_square, [3, 1, 2], 100_000))
    assert started == [3]
    assert [(item, square) for item, (_, square) in results] == [(3, 9), (1, 1), (2, 4)]
    assert os.getpid() not in {pid for _, (pid, _) in results}


def kill_worker(_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.dist
def test_a_worker_that_is_killed_is_one_line():
    with pytest.raises(ValueError, match=r"^a worker was killed.* fewer --workers$"):
        list(in_processes(kill_worker, [1, 2], 2))


def sleep_in(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(100)


@pytest.mark.dist
def test_workers_end_with_the_process_that_is_killed(tmp_path):
    """Otherwise they would wait forever, and with them what they inherited, such as a lock."""

    def start():
        list(in_processes(sleep_in, [tmp_path, tmp_path], 2))

    parent = get_context("fork").Process(target=start)
    parent.start()
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    workers = [int(file.name) for file in tmp_path.iterdir()]
    try:
        assert all(map(running, workers))
        parent.kill()
        parent.join()
        wait_for(lambda: not any(map(running, workers)))
    finally:
        for worker in filter(running, workers):
            os.kill(worker, signal.SIGKILL)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid):
    try:
        return not re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False
