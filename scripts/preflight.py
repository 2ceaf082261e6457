"""Before a long build: say in one line what is missing and which command brings it. Exits 1 if anything is."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

NEEDED_BYTES = 2 << 30

# By the package manager that is there: compiler, Python headers, Python's venv module
INSTALL = {
    "apt-get": (
        "apt-get install -y build-essential",
        "apt-get install -y python3-dev",
        "apt-get install -y python3-venv",
    ),
    "dnf": ("dnf install -y gcc gcc-c++ make", "dnf install -y python3-devel", "dnf install -y python3-libs"),
    "pacman": ("pacman -S --needed base-devel", "pacman -S --needed python", "pacman -S --needed python"),
    "apk": ("apk add build-base linux-headers", "apk add python3-dev", "apk add python3"),
    "zypper": ("zypper install -y gcc gcc-c++ make", "zypper install -y python3-devel", "zypper install -y python3"),
    "brew": ("xcode-select --install", "brew install python", "brew install python"),
}
OTHERWISE = (
    "install a C and C++ compiler and make",
    "install the Python development headers",
    "install Python with its venv and ensurepip modules",
)
COMPILER, HEADERS, VENV = range(3)


def install_command(what: int) -> str:
    for manager, commands in INSTALL.items():
        if shutil.which(manager):
            needs_root = manager != "brew" and hasattr(os, "geteuid") and os.geteuid() != 0
            return ("sudo " if needs_root else "") + commands[what]
    return OTHERWISE[what]


def missing_compiler() -> str | None:
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        wanted = os.environ.get(variable, "").split()[:1] or names
        if not any(shutil.which(name) for name in wanted):
            return (
                f"no {'C' if variable == 'CC' else 'C++'} compiler ({', '.join(wanted)}): {install_command(COMPILER)}"
            )
    return None


def missing_headers() -> str | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else f"no Python headers for {sys.executable}: {install_command(HEADERS)}"


def missing_venv() -> str | None:
    """Debian and Ubuntu ship Python without ensurepip, and `python -m venv` fails half-way."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    return f"{sys.executable} has no module {missing[0]}: {install_command(VENV)}" if missing else None


def missing_space() -> str | None:
    free = shutil.disk_usage(Path.cwd()).free
    if free >= NEEDED_BYTES:
        return None
    return f"{free >> 20} MiB free in {Path.cwd()}, the build needs {NEEDED_BYTES >> 20}: free some space and try again"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", action="store_true", help="a virtual environment is to be made, too")
    parser.add_argument("--no-python", action="store_true", help="nothing is to be compiled for Python")
    parser.add_argument("--no-space", action="store_true", help="a small build, or one that was done before")
    args = parser.parse_args(argv)
    checks = [missing_compiler]
    checks += [] if args.no_python else [missing_headers]
    checks += [missing_venv] if args.venv else []
    checks += [] if args.no_space else [missing_space]
    problems = [text for check in checks if (text := check())]
    for text in problems:
        print(f"tq-ggml: {text}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
