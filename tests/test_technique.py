"""A technique can be deleted: its module, its line in `Config`, its tests; the rest goes on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL

ROOT = Path(__file__).resolve().parents[1]


def without(technique: str, copy: Path) -> Path:
    """A copy of the repository in which a technique's module, line and tests are deleted."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / f"{technique}.py").unlink()
    (copy / "tests" / f"test_{technique}.py").unlink()
    config = (copy / "config.py").read_text()
    imports = rf"^(import {technique}|from {technique} import .*)\n"
    line = rf"^    {technique}: \w+ = technique\((?:.*\)|\n(?:        .*\n)*    \))\n"
    for pattern in (imports, line):
        config, count = re.subn(pattern, "", config, flags=re.MULTILINE)
        assert count, pattern
    (copy / "config.py").write_text(config)
    return copy


@pytest.mark.parametrize(
    ("technique", "flags"),
    [
        ("pseudo", "--ltd --pack --curriculum seqlen"),
        pytest.param("ltd", "--pack --pseudo --offload", marks=pytest.mark.slow),
        pytest.param("offload", "--ltd --pack --pseudo", marks=pytest.mark.slow),
        pytest.param("curriculum", "--ltd --pack --pseudo", marks=pytest.mark.slow),
    ],
)
def test_without_a_technique_the_rest_trains_samples_and_passes_its_tests(
    technique, flags, tmp_path, store_dir
):
    copy = without(technique, tmp_path / "copy")

    def succeeds(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    train = ["train.py", *SMALL.split(), "--data", str(store_dir), "--tokens", "1024"]
    succeeds(*train, "--out", "plain")
    succeeds(*train, *flags.split(), "--out", "run")
    assert f"--{technique}" not in succeeds("train.py", "--help")
    succeeds("sample.py", "run", "--tokens", "3")
    succeeds("evaluate.py", "run", "--device", "cpu", "--tokens", "500")
    tests = ["tests/test_model.py", "tests/test_data.py", "tests/test_checkpoint.py"]
    succeeds("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests[:2])
