"""scripts/wheel.py on made-up wheels; `make wheel` builds and tries real ones."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import wheel  # noqa: E402

NAME = "tq_ggml-0.1.0-cp310-abi3-manylinux_2_35_x86_64.whl"
GOOD = [
    "tq_ggml/__init__.py",
    "tq_ggml/_kernels.abi3.so",
    *(f"tq_ggml/lib/{name}.so" for name in wheel.LIBRARIES),
    "tq_ggml/lib/LICENSE.llama.cpp",
    "tq_ggml-0.1.0.dist-info/licenses/LICENSE",
]


def made(folder: Path, names: list[str], name: str = NAME) -> Path:
    with zipfile.ZipFile(folder / name, "w") as out:
        for inside in names:
            out.writestr(inside, "")
    return folder / name


def test_a_wheel_that_is_as_it_should_be(tmp_path):
    assert wheel.problems_of(made(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("names", "name", "why"),
    [
        (GOOD, "tq_ggml-0.1.0-cp311-cp311-linux_x86_64.whl", "abi3"),
        (GOOD[:1] + GOOD[2:], NAME, "_kernels"),
        ([name for name in GOOD if "libtq" not in name], NAME, "tq_ggml/lib has"),
        ([*GOOD, "tq_ggml/lib/libllama.so.0"], NAME, "tq_ggml/lib has"),
        ([*GOOD, "tq_ggml.libs/libgomp.so"], NAME, "nobody needs tq_ggml.libs"),
        ([*GOOD, "tq_ggml/ggml.h"], NAME, "ggml.h"),
        (GOOD[:-2] + GOOD[-1:], NAME, "licence"),
    ],
)
def test_a_wheel_that_is_not(tmp_path, names, name, why):
    (problem,) = wheel.problems_of(made(tmp_path, names, name))
    assert why in problem


def test_an_environment_without_compilers(monkeypatch):
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert wheel.bare(Path("/new/bin"))["PATH"] == "/new/bin"
    assert not {"CC", "PYTHONPATH", "VIRTUAL_ENV"} & set(wheel.bare(Path("/new/bin")))


def test_an_architecture_that_needs_a_machine_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(wheel.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--arch", "x86_64"])
    assert wheel.main() == 1
    assert "built on a machine of that kind" in capsys.readouterr().err


def test_nothing_built_yet(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(wheel, "DIST", tmp_path)
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--try-only"])
    assert wheel.main() == 1
    assert "run `make wheel`" in capsys.readouterr().err
