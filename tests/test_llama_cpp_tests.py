"""llama.cpp's own tests, from the patched tree, for our types. `make test` builds them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import build  # noqa: E402


def run(name: str, *arguments: str) -> str:
    tree = build.build_tree()
    program = tree / "bin" / name if tree else None
    if program is None or not program.is_file():
        reason = f"{name} is not built; run `make test`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def test_quantize_fns():
    output = run("test-quantize-fns", "-v")
    for cache_type in ("tq3", "tq4"):
        for what in ("absolute quantization error", "reference implementation error", "dot product error"):
            assert re.search(rf"{cache_type} {what}: +ok", output), f"{cache_type}: {what} was not tested"


OURS = "=tq[34]"
# Of the other types that our attention takes, a selection: all cases take minutes.
OTHER_TYPES = "hsk=64,.*kv=113,.*type_K=(q8_0|q4_0|iq4_nl)"
OTHER_HEADS = "hsk=(96|192|256|512|576),.*kv=113,.*type_K=(f16|q8_0)"


@pytest.mark.parametrize(
    ("op", "cases", "at_least"),
    [
        *((op, OURS, n) for op, n in (("SET_ROWS", 40), ("GET_ROWS", 16), ("CPY", 30), ("MUL_MAT", 20))),
        *(("FLASH_ATTN_EXT", cases, n) for cases, n in ((OURS, 700), (OTHER_TYPES, 100), (OTHER_HEADS, 150))),
    ],
)
def test_backend_ops(op, cases, at_least):
    output = run("test-backend-ops", "test", "-b", "CPU", "-o", op, "-p", cases, "-j", "2")
    passed = re.findall(rf"^\s*{op}\(.*{cases}.*: OK$", output, re.MULTILINE)
    assert len(passed) >= at_least, f"only {len(passed)} cases of {op} ran for {cases}"
    assert "FAIL" not in output and "not supported" not in output
