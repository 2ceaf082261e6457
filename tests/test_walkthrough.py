"""docs/walkthrough.md: its numbers are those of `scripts/walkthrough.py`, and its bytes decode to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tq_ggml import kernels

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = str(ROOT / "scripts")
PAGE = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
CHECK_ANOTHER = (
    "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import walkthrough; "
    "walkthrough.PAGE = pathlib.Path(sys.argv[2]); sys.argv = ['x', '--check']; sys.exit(walkthrough.main())"
)


def table(name: str) -> list[list[str]]:
    lines = PAGE.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def check(path: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", CHECK_ANOTHER, SCRIPTS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_the_page_is_up_to_date():
    assert check(ROOT / "docs" / "walkthrough.md") == (0, "")


def test_a_changed_page_is_noticed(tmp_path):
    changed = PAGE.replace("| 0 | 1 | 12.73 |", "| 0 | 1 | 12.74 |")
    assert changed != PAGE
    (tmp_path / "page.md").write_text(changed, encoding="utf-8")
    status, said = check(tmp_path / "page.md")
    assert status == 1 and "other numbers; run scripts/walkthrough.py" in said


def test_its_bytes_decode_to_its_values():
    data, tq4 = (bytes.fromhex("".join(row[1] for row in table(name))) for name in ("bytes", "bytes-tq4"))
    block = table("block")
    decoded = kernels.dequantize(np.frombuffer(data, np.uint8)[None], "tq3")[0]
    np.testing.assert_allclose(decoded, [float(row[8]) for row in block], atol=0.006)
    values = np.array([[float(row[1]) for row in block]], np.float32)
    assert kernels.quantize(values, "tq3").tobytes() == data
    assert kernels.quantize(values, "tq4").tobytes() == tq4


def test_its_text_agrees_with_its_numbers():
    assert table("stages")[0][2:] == ["12.73", "72 %"] and "it alone has 72 % of the energy" in PAGE
    exact, rotated, decoded, in_rotated_domain, in_int8 = (float(row[1]) for row in table("keys"))
    assert exact == pytest.approx(rotated) and decoded == pytest.approx(in_rotated_domain)
    assert in_int8 == pytest.approx(decoded, rel=0.01)
    one_by_one, once = table("value-sums")[-1][2:]
    assert one_by_one == once
    _, mse, prod = table("bias")
    assert float(prod[2]) > 2 * float(mse[2])
    assert (ROOT / "docs" / "walkthrough-block.svg").stat().st_size > 10_000
