"""Before a long build: say in one line what is missing and which command brings it. Exits 1 if anything is."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

NEEDED_BYTES = 2 << 30

# package names by the package manager that is there: compiler, Python headers
INSTALL = {
    "apt-get": ("apt-get install -y build-essential", "apt-get install -y python3-dev"),
    "dnf": ("dnf install -y gcc gcc-c++ make", "dnf install -y python3-devel"),
    "pacman": ("pacman -S --needed base-devel", "pacman -S --needed python"),
    "apk": ("apk add build-base linux-headers", "apk add python3-dev"),
    "zypper": ("zypper install -y gcc gcc-c++ make", "zypper install -y python3-devel"),
    "brew": ("xcode-select --install", "brew install python"),
}


def install_command(what: int) -> str:
    for manager, commands in INSTALL.items():
        if shutil.which(manager):
            needs_root = manager != "brew" and hasattr(os, "geteuid") and os.geteuid() != 0
            return ("sudo " if needs_root else "") + commands[what]
    return ("install a C and C++ compiler and make", "install the Python development headers")[what]


def missing_compiler() -> str | None:
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        wanted = os.environ.get(variable, "").split()[:1] or names
        if not any(shutil.which(name) for name in wanted):
            return f"no {'C' if variable == 'CC' else 'C++'} compiler ({', '.join(wanted)}): {install_command(0)}"
    return None


def missing_headers() -> str | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"no Python headers for {sys.executable}: {install_command(1)}"


def missing_space() -> str | None:
    free = shutil.disk_usage(Path.cwd()).free
    if free >= NEEDED_BYTES:
        return None
    return f"{free >> 20} MiB free in {Path.cwd()}, the build needs {NEEDED_BYTES >> 20}: free some space and try again"


def main() -> int:
    problems = [text for check in (missing_compiler, missing_headers, missing_space) if (text := check())]
    for text in problems:
        print(f"tq-ggml: {text}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
