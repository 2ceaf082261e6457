"""The NEON kernels, cross-compiled and run under qemu at both of their levels, against the numpy specification."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from codec_rows import BLOCK_BYTES, gaussian
from codec_tool import ARM_INSTALL, EACH_KIND, EACH_TYPE, QEMU, call, check, run


class Run(NamedTuple):
    """A CPU for qemu, TQ_SIMD, and the level that must run there."""

    cpu: str
    forced: str
    level: str

    @property
    def suffix(self) -> str:
        return "ref" if self.level == "scalar" else self.level

    def command(self, tool: Path, *qemu_options) -> list:
        return [QEMU, "-cpu", self.cpu, *qemu_options, tool]


RUNS = [
    Run("cortex-a72", "", "neon"),
    Run("cortex-a72", "scalar", "scalar"),
    Run("cortex-a72", "neon", "neon"),
    Run("cortex-a72", "dotprod", "neon"),  # it has none
    Run("neoverse-n1", "", "dotprod"),
    Run("neoverse-n1", "scalar", "scalar"),
    Run("neoverse-n1", "neon", "neon"),
    Run("neoverse-n1", "dotprod", "dotprod"),
    Run("max", "", "dotprod"),
]
EACH_RUN = pytest.mark.parametrize("arm", RUNS, ids=lambda arm: f"{arm.cpu}-{arm.forced or 'auto'}")


@pytest.fixture(scope="module")
def tool(arm_tools) -> Path:
    return arm_tools / "tq_codec_tool"


@EACH_RUN
def test_the_level_that_runs(tool, arm):
    """A level that the CPU lacks is refused aloud, and the best one runs."""
    _, stderr = run(arm.command(tool), arm.forced, "tq4", "values", gaussian(1), gaussian(1))
    expected = f"level: {arm.level}\n"
    if arm.forced not in ("", arm.level):
        expected = f"tq-ggml: TQ_SIMD={arm.forced} cannot run here; using neon. Levels here: neon scalar\n{expected}"
    assert stderr == expected


@EACH_TYPE
@EACH_RUN
def test_the_functions_that_run(tool, arm, name, tmp_path):
    """Not only the level's name: qemu writes down which functions it translated."""
    log = tmp_path / "log"
    run(arm.command(tool, "-d", "in_asm", "-D", log), arm.forced, name, "values", gaussian(1), gaussian(1))
    executed = set(re.findall(r"^IN: (tq\w*_(?:ref|neon|dotprod))$", log.read_text(), re.MULTILINE))
    rows = (f"{name}_quantize_row", f"{name}_dequantize_row", f"{name}_vec_dot", "tq_query_row")
    assert executed >= {f"{row}_{arm.suffix}" for row in rows}
    assert all(function.endswith(f"_{arm.suffix}") for function in executed)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaN in numpy
@EACH_KIND
@EACH_TYPE
@EACH_RUN
def test_rows(tool, arm, name, kind):
    check(arm.command(tool), arm.forced, arm.level, name, kind)


def test_instructions(tool):
    """What a CPU without them would meet: sdot is in the dotprod kernels only, and fused additions in no encoder."""
    objdump = shutil.which("aarch64-linux-gnu-objdump")
    assert objdump, f"binutils belong to the compiler; {ARM_INSTALL}"
    listing = call([objdump, "-d", "--no-show-raw-insn", tool]).stdout.decode()
    functions = dict(re.findall(r"^[0-9a-f]+ <(tq\w+)>:\n((?:.+\n)+)", listing, re.MULTILINE))
    with_sdot = {function for function, body in functions.items() if "\tsdot\t" in body}
    fused = {function for function, body in functions.items() if re.search(r"\tf(madd|mla|msub|mls|nmadd)\t", body)}
    assert {f"{name}_vec_dot_dotprod" for name in BLOCK_BYTES} <= with_sdot
    assert {function for function in with_sdot if not function.endswith("_dotprod")} == set()
    assert {f"{name}_vec_dot_{isa}" for name in BLOCK_BYTES for isa in ("neon", "dotprod")} <= fused
    assert {
        function for function in fused if "quantize" in function or re.fullmatch("tq[34]_.*_ref", function)
    } == set()
