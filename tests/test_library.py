"""Loading our libraries. Each case needs its own interpreter: a library cannot be unloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tq_ggml import library

ACTIVATE = """
import sys
from tq_ggml import library
from tq_ggml.errors import EngineError
try:
    library.activate()
except EngineError as error:
    print("EngineError:", error)
else:
    print("activated")
"""


def run(code: str, **env: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_activates_without_a_word():
    assert run(ACTIVATE) == "activated\n"


def test_activate_twice_is_one_module():
    assert library.activate() is library.activate() is sys.modules["llama_cpp"]


@pytest.mark.parametrize("before", [None, "somewhere"])
def test_environment_is_left_as_it_was(before):
    show = "import os; print(os.environ.get('LLAMA_CPP_LIB_PATH'))"
    env = {} if before is None else {"LLAMA_CPP_LIB_PATH": before}
    assert run(ACTIVATE + show, **env) == f"activated\n{before}\n"


def test_llama_cpp_imported_before_with_our_libraries_is_fine():
    folder = str(library.lib_dir())
    assert run("import llama_cpp" + ACTIVATE, LLAMA_CPP_LIB_PATH=folder).endswith("activated\n")


def test_llama_cpp_imported_before_with_other_libraries(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(library.lib_dir(), other)
    said = run("import llama_cpp" + ACTIVATE, LLAMA_CPP_LIB_PATH=str(other))
    assert f"uses the libraries in {other}" in said
    assert "call tq_ggml.activate() before the first `import llama_cpp`" in said


def test_wrong_version_is_refused_before_anything_is_loaded(tmp_path):
    info = tmp_path / "llama_cpp_python-0.3.35.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.35\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = run(ACTIVATE + "print('llama_cpp' in sys.modules)", PYTHONPATH=path)
    assert "llama-cpp-python 0.3.35 is installed, but these libraries belong to 0.3.36" in said
    assert "pip install --config-settings=wheel.cmake=false llama-cpp-python==0.3.36" in said
    assert said.endswith("False\n")


def test_missing_llama_cpp_python():
    hide = """
import importlib.metadata, importlib.util
import tq_ggml
def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = absent
importlib.util.find_spec = lambda name, package=None: None
"""
    said = run(hide + ACTIVATE)
    assert said.startswith("EngineError: llama-cpp-python is not installed; run: ")
    assert "pip install --config-settings=wheel.cmake=false llama-cpp-python==0.3.36" in said


def test_no_libraries(tmp_path):
    said = run(ACTIVATE, TQ_GGML_LIB_PATH=str(tmp_path))
    assert said.startswith(f"EngineError: no libllama in {tmp_path}") and "build it with `make dev`" in said


def test_a_library_that_does_not_load(tmp_path):
    (tmp_path / "libllama.so").write_bytes(b"not a library")
    said = run(ACTIVATE, TQ_GGML_LIB_PATH=str(tmp_path))
    assert said.startswith(f"EngineError: llama_cpp does not load with the libraries in {tmp_path}")


def test_log_keeps_errors_and_joins_continued_lines(capsys):
    library.activate()
    log = library._EngineLog()
    log(2, b"loading\n", None)
    log(4, b"init: no tensor ", None)
    log(5, b"named x\n", None)
    log(3, b"a warning\n", None)
    log(4, b"load: failed\n", None)
    assert log.reason() == " (llama.cpp: init: no tensor named x; load: failed)"
    log.clear()
    assert log.reason() == ""
    assert capsys.readouterr().err == ""
