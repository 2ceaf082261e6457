"""The kernels of this machine at every level it can run, in a program of their own, against the numpy specification."""

from __future__ import annotations

import platform

import pytest
from codec_rows import gaussian
from codec_tool import EACH_KIND, EACH_TYPE, check, run

LEVELS = {"x86_64": ("avx2", "avx512bw", "avx512"), "aarch64": ("neon", "dotprod"), "arm64": ("neon", "dotprod")}
EACH_LEVEL = pytest.mark.parametrize("level", ("scalar", *LEVELS.get(platform.machine(), ())))


@pytest.fixture(scope="module")
def tool(native_tools):
    return native_tools / "tq_codec_tool"


@pytest.fixture(scope="module")
def sanitized_tool(sanitized_tools):
    return sanitized_tools / "tq_codec_tool"


def need(tool, level: str) -> None:
    """Skip the test where this CPU lacks the level."""
    _, stderr = run([tool], level, "tq4", "values", gaussian(1), gaussian(1))
    if not stderr.endswith(f"level: {level}\n"):
        pytest.skip(f"this CPU cannot run {level}: {stderr.strip()}")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaN in numpy
@EACH_KIND
@EACH_TYPE
@EACH_LEVEL
def test_rows(tool, level, name, kind):
    need(tool, level)
    check([tool], level, level, name, kind)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@EACH_KIND
@EACH_TYPE
@EACH_LEVEL
def test_rows_under_the_address_and_undefined_behaviour_sanitizers(sanitized_tool, level, name, kind):
    need(sanitized_tool, level)
    check([sanitized_tool], level, level, name, kind)


def test_the_sanitizers_are_on(sanitized_tool):
    program = sanitized_tool.read_bytes()
    assert b"__asan_report_load" in program and b"__ubsan_handle" in program
