"""The tests marked gpu on many workers, those of offload and FSDP first, and a record of each.

A test is recorded as soon as it has ended, in results/gpu-tests.jsonl, and all of them in
results/gpu-tests.xml when the last one has, or when a SIGTERM ends them early. Each worker compiles
its own kernels, so that compilations go on side by side; without pytest-xdist there is one worker.

    python bench/gpu_tests.py --device cuda --record
    python bench/gpu_tests.py --device cpu tests/test_sizes.py       # does it work?
"""

import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from record import RESULTS, ROOT, command_line, recorder, significant

FIRST = ("tests/test_offload.py", "tests/test_several_ranks.py")
WORKERS = 12  # of 16 cores: some tests start processes of their own


class Recorder:
    """A plugin: the outcome of each test, kept as it ends."""

    def __init__(self, keep: Callable[[dict], None]):
        self.keep = keep
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return  # outside the test itself only failures and skips count
        self.outcomes[report.nodeid] = report.outcome
        why = {} if report.passed else {"why": str(report.longrepr)[-2000:]}
        figures = {"test": report.nodeid, "outcome": report.outcome, **why}
        self.keep(figures | {"seconds": significant(report.duration, 3)})


def files() -> list[str]:
    """Those with a test marked gpu."""
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    return sorted(marked, key=lambda name: name not in FIRST)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="*", help="(default: all with a test marked gpu)")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"({WORKERS})")
    args = parser.parse_args()
    plugin = Recorder(recorder("tests", args))
    # pytest writes what it knows when it is interrupted, and nothing when it is terminated
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mark = "gpu" if args.device == "cuda" else "not gpu and not slow"
    # addopts of pyproject.toml leave out the tests marked gpu
    flags = ["-v", "-o", "addopts=", "-p", "no:cacheprovider", "-m", mark]
    if find_spec("xdist"):
        flags += ["-n", str(args.workers), "--dist", "load", "--maxschedchunk", "1"]
    if args.record:
        flags.append(f"--junit-xml={RESULTS / 'gpu-tests.xml'}")
    status = pytest.main([*flags, *(args.files or files())], plugins=[plugin])
    outcomes = list(plugin.outcomes.values())
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(f"{len(outcomes)} tests: {counts}, status {int(status)}", flush=True)
    return int(status) and 1


if __name__ == "__main__":
    sys.exit(main())
