"""Can this machine reach what the tests fetch? A plain 'no' skips loudly; a failure after a 'yes' is a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

import pytest


@cache
def _answers(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=300).returncode == 0


def need_index(package: str) -> None:
    """Skip the test when pip's index does not offer the package."""
    if not _answers(sys.executable, "-m", "pip", "index", "versions", package):
        pytest.skip(f"pip cannot reach an index that has {package}")


def need_debian(package: str) -> None:
    """Skip the test when apt does not offer the package."""
    for tool in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(tool) is None:
            pytest.skip(f"{package} is a Debian package and there is no {tool} here")
    if not _answers("apt-cache", "show", package):
        pytest.skip(f"apt does not know {package}: run `apt-get update` first")
