"""The tests marked gpu on many workers, those of offload and FSDP first.

The outcome of each test is printed as it ends, and results/gpu-tests.xml has all of them when the
last one ended, or a SIGTERM came. Each worker compiles its own kernels, so that
compilations go on side by side; without pytest-xdist there is one worker.

    python bench/gpu_tests.py --device cuda --record
    python bench/gpu_tests.py --device cpu tests/test_sizes.py       # does it work?
"""

import signal
import sys
from importlib.util import find_spec

import pytest
from measure import RESULTS, ROOT, command_line

FIRST = ["tests/test_offload.py", "tests/test_several_ranks.py"]
WORKERS = 12  # of 16 cores: some tests start processes of their own


def files() -> list[str]:
    """Those with a test marked gpu."""
    paths = [path for path in ROOT.glob("tests/test_*.py") if "mark.gpu" in path.read_text()]
    return list(dict.fromkeys([*FIRST, *sorted(f"tests/{path.name}" for path in paths)]))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="*", help="(default: all with a test marked gpu)")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"({WORKERS})")
    args = parser.parse_args()
    # pytest writes what it knows when it is interrupted, and nothing when it is terminated
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mark = "gpu" if args.device == "cuda" else "not gpu and not slow"
    # addopts of pyproject.toml leave out the tests marked gpu
    flags = ["-v", "-o", "addopts=", "-p", "no:cacheprovider", "-m", mark]
    if find_spec("xdist"):
        flags += ["-n", str(args.workers), "--dist", "load", "--maxschedchunk", "1"]
    if args.record:
        flags.append(f"--junit-xml={RESULTS / 'gpu-tests.xml'}")
    return int(pytest.main([*flags, *(args.files or files())]))


if __name__ == "__main__":
    sys.exit(main())
