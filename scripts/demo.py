"""`make demo`: compare the cache types on a real model, SmolLM2-135M, and show the table.

    python scripts/demo.py            print the table
    python scripts/demo.py --readme   also put it into README.md, between its two demo marks

The same with your own model: tq-ggml compare --model YOUR.gguf
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

from tq_ggml import cli

README = Path(__file__).resolve().parent.parent / "README.md"
COMMAND = "compare --model smollm2 --types f16,q8_0,q4_0,tq4,tq3 --ctx 1024 --windows 2 --depth 1024 --threads 2"


def table() -> str:
    """The markdown table that the command prints. Exits with the command's status when it fails."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = cli.main(COMMAND.split())
    if status:
        sys.exit(status)
    return stdout.getvalue()


def put_into_readme(text: str) -> None:
    """Replace what stands between the marks in README.md."""
    marks = r"(<!-- demo -->\n).*?(<!-- /demo -->)"
    readme, found = re.subn(marks, lambda m: m[1] + text + m[2], README.read_text(encoding="utf-8"), flags=re.DOTALL)
    if found != 1:
        sys.exit("README.md has no <!-- demo --> and <!-- /demo --> marks to write between")
    README.write_text(readme, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    print(f"tq-ggml {COMMAND}\n(SmolLM2-135M-Instruct on Shakespeare; a few minutes)", file=sys.stderr)
    text = table()
    print(text, end="")
    print("\nYour own model: .venv/bin/tq-ggml compare --model YOUR.gguf", file=sys.stderr)
    if args.readme:
        put_into_readme(text)


if __name__ == "__main__":
    main()
