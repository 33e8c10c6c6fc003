"""Functions that a user names on the command line as path.py:name."""

import runpy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache
def load_function(name: str) -> Callable:
    """The function that `path.py:name` names."""
    path, _, function = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise ValueError(f"{name}: there is no Python file {path}")
    value = call(name, runpy.run_path, path).get(function)
    if not callable(value):
        raise ValueError(f"{name}: {path} defines no function {function}")
    return value


def call(described: str, function: Callable, *args: object) -> Any:
    """Run a user's code; whatever it raises becomes one line that begins with `described`."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{described}: raised {type(error).__name__}: {error}") from None
