#!/usr/bin/env python3
"""Write docs/api.md, the API reference, from signatures and docstrings; ``--check`` says whether it is up to date."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
HEAD = """# API reference

`scripts/make_api_reference.py` writes this page from the docstrings. Names that start with an underscore, and modules
that are not here, may change at any time. Every error that is meant for the user is a `tq_ggml.errors.TqError`.
"""
MODULES = (
    *("errors", "cache_types", "llama", "library", "kernels", "engine", "models", "fit"),
    *("evaluation", "benchmark", "behaviour", "calibration", "inspection", "conditioning", "metadata", "rpc"),
    *("session", "codebooks", *(f"reference.{name}" for name in ("blocks", "rotations", "methods", "polar", "cache"))),
)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")


def members(owner: ModuleType | type) -> Iterator[tuple[str, Any]]:
    """Public classes, functions and properties with a docstring, in the order of the source."""
    for name, value in vars(owner).items():
        if name.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            yield name, value
        plain = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isclass(plain) or inspect.isfunction(plain):
            home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
            if plain.__module__ == home:
                yield name, value


def signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return name
    try:
        # Annotations are strings in our modules, and quoted or not depending on Python's version.
        return name + re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return name


def markdown(docstring: str) -> str:
    """A docstring in the house's form (Google's sections, ``double backticks``) as Markdown."""
    out: list[str] = []
    section = None
    for line in docstring.replace("``", "`").splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if found := SECTION.fullmatch(line):
            section = found[1]
            out += ["", f"*{section}*", ""]
        elif section and text and indent == 0:
            section = None
            out += ["", line]
        elif section in ("Args", "Attributes", "Raises") and indent == 4:
            what, _, meaning = text.partition(": ")
            out.append(f"- `{what}`: {meaning}")
        elif section and text:
            out.append(("  " if section in ("Args", "Attributes", "Raises") else "") + text)
        else:
            out.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


def entry(name: str, value: Any, level: str) -> str:
    parts = [f"{level} `{name}`\n"]
    if not isinstance(value, property) and not (inspect.isclass(value) and issubclass(value, Exception)):
        parts.append(f"```text\n{signature(name, value)}\n```\n")
    parts.append(markdown(inspect.getdoc(value)))
    if inspect.isclass(value):
        parts += [entry(f"{name}.{inner}", member, "####") for inner, member in members(value)]
    return "\n".join(parts)


def reference() -> str:
    parts = [HEAD]
    for name in MODULES:
        module = importlib.import_module(f"tq_ggml.{name}")
        parts.append(f"## `tq_ggml.{name}`\n\n{markdown(inspect.getdoc(module))}")
        parts += [entry(inner, member, "###") for inner, member in members(module)]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is out of date")
    page = reference()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("docs/api.md is out of date; run scripts/make_api_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
