"""The build's own programs: the llama.cpp source and its patches, what is checked before a build, what was built."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tq_ggml import library, packages

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import build  # noqa: E402
import fetch_llama_cpp as fetch  # noqa: E402
import preflight  # noqa: E402

USERS_CACHE = packages.cache_dir()
PATCH = """\
diff --git a/src/one.txt b/src/one.txt
--- a/src/one.txt
+++ b/src/one.txt
@@ -1,3 +1,4 @@
 a
-b
+B
+bb
 c
@@ -6,2 +7,3 @@
 f
+ff
 g
"""
TEXT = "a\nb\nc\nd\ne\nf\ng\n"
PATCHED = "a\nB\nbb\nc\nd\ne\nf\nff\ng\n"


def write_source(folder: Path, **files: str) -> Path:
    """A llama.cpp source of three files, or more."""
    for name, text in {"ggml/include/ggml.h": "", "src/one.txt": TEXT, "src/two.txt": "two\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != fetch.MARK]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def one_patch(tmp_path, monkeypatch):
    """An environment of its own, and one patch."""
    monkeypatch.delenv("TQ_LLAMA_CPP_SRC", raising=False)
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "0001-a.patch").write_text(PATCH)
    monkeypatch.setattr(fetch, "PATCHES", tmp_path / "patches")


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "target"


# ---- patches ----


def test_the_tree_is_the_source_with_patches_however_often_it_is_made(source, target):
    before = contents(source)
    fetch.make_tree(source, target)
    assert contents(target) == {**before, "src/one.txt": PATCHED}
    assert contents(source) == before
    made = times(target)
    fetch.make_tree(source, target)
    assert times(target) == made, "an unchanged file must keep its time, or all is compiled again"


def test_a_changed_patch_starts_from_the_original(source, target):
    fetch.make_tree(source, target)
    patch = fetch.PATCHES / "0001-a.patch"
    patch.write_text(PATCH.replace("+ff", "+FF"))
    fetch.make_tree(source, target)
    assert contents(target)["src/one.txt"] == PATCHED.replace("ff", "FF")
    patch.unlink()
    fetch.make_tree(source, target)
    assert contents(target) == contents(source)


def test_moved_lines_are_found(source, target):
    (source / "src/one.txt").write_text("new\nlines\n" + TEXT)
    fetch.make_tree(source, target)
    assert contents(target)["src/one.txt"] == "new\nlines\n" + PATCHED


def test_a_source_that_changed_says_what_to_do_and_nothing_is_written(source, target):
    (source / "src/one.txt").write_text(TEXT.replace("b", "beta"))
    with pytest.raises(fetch.FetchError, match=r"does not fit src/one.txt near line 1.*docs/building.md"):
        fetch.make_tree(source, target)
    assert not target.exists()


def test_a_missing_file_says_which(source, target):
    (source / "src/one.txt").unlink()
    with pytest.raises(fetch.FetchError, match=r"0001-a.patch changes src/one.txt"):
        fetch.make_tree(source, target)


def test_a_folder_of_somebody_else_is_left_alone(source, target):
    write_source(target, **{"src/mine.txt": "mine"})
    with pytest.raises(fetch.FetchError, match="was not made by this program"):
        fetch.make_tree(source, target)
    assert contents(target)["src/mine.txt"] == "mine"


def test_our_patches_stay_small():
    changed = 0
    for patch in (ROOT / "c_src" / "patches").glob("*.patch"):
        lines = patch.read_text().splitlines()
        changed += sum(line[:1] in ("+", "-") and line[:3] not in ("+++", "---") for line in lines)
    assert 0 < changed < 100, f"{changed} changed lines: patches are for call sites only"


# ---- where the source comes from: a small package index stands in for the real one, pip is pip ----


def publish(folder: Path, version: str, **files: str) -> str:
    """Put a small llama-cpp-python source distribution into a folder that pip looks into. Returns its sha256."""
    root = folder / f"llama_cpp_python-{version}"
    write_source(root / "vendor" / "llama.cpp", **files)
    metadata = f'[project]\nname = "llama_cpp_python"\nversion = "{version}"\n'
    system = '[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n'
    (root / "pyproject.toml").write_text(system + metadata)
    (root / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n")
    with tarfile.open(folder / f"{root.name}.tar.gz", "w:gz") as tar:
        tar.add(root, root.name)
    shutil.rmtree(root)
    return fetch.sha256_of(folder / f"{root.name}.tar.gz")


def pin(monkeypatch, version: str, sha256: str) -> None:
    monkeypatch.setattr(fetch, "VERSION", version)
    monkeypatch.setattr(fetch, "ARCHIVE", f"llama_cpp_python-{version}.tar.gz")
    monkeypatch.setattr(fetch, "SHA256", sha256)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder as pip's only index, with the pinned version in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    pin(monkeypatch, "0.0.1", publish(folder, "0.0.1"))
    return folder


def test_the_pinned_source_is_fetched_once(index, target):
    assert fetch.main([str(target)]) == 0
    assert contents(target)["src/one.txt"] == PATCHED
    for file in index.iterdir():
        file.unlink()
    made = times(target)
    assert fetch.main([str(target)]) == 0
    assert times(target) == made


def test_a_file_that_is_not_the_pinned_one_is_refused(index, target, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    assert fetch.main([str(target)]) == 1
    assert "is not the one this version was made for (sha256 000000000000...)" in capsys.readouterr().err
    assert not target.exists() and not list(fetch.cache_folder().glob("l*"))


def test_a_damaged_archive_in_the_cache_is_fetched_again(index, target):
    kept = fetch.cache_folder() / fetch.ARCHIVE
    kept.parent.mkdir(parents=True)
    kept.write_bytes((index / fetch.ARCHIVE).read_bytes()[:-100])
    assert fetch.main([str(target)]) == 0
    assert fetch.sha256_of(kept) == fetch.SHA256


def test_what_a_killed_run_left_behind_does_no_harm(index, target):
    write_source(fetch.cache_folder() / ".part" / "llama_cpp_python-0.0.1" / "vendor" / "llama.cpp", **{"src/x": "x"})
    assert fetch.main([str(target)]) == 0
    assert "src/x" not in contents(target)
    assert not (fetch.cache_folder() / ".part").exists()


def test_offline_it_says_what_to_do(index, target, capsys):
    (index / fetch.ARCHIVE).unlink()
    assert fetch.main([str(target)]) == 1
    said = capsys.readouterr().err
    assert "could not download llama-cpp-python==0.0.1 (ERROR: " in said and "Traceback" not in said
    assert f"or put {fetch.ARCHIVE} into {fetch.cache_folder()}" in said


def test_a_moved_pin_and_a_source_of_ones_own_give_the_right_tree(index, target, tmp_path, monkeypatch):
    def made() -> dict[str, str]:
        assert fetch.main([str(target)]) == 0
        return contents(target)

    first = made()
    pin(monkeypatch, "0.0.2", publish(index, "0.0.2", **{"src/two.txt": "second\n", "src/new.txt": "new\n"}))
    second = made()
    assert second == {**first, "src/two.txt": "second\n", "src/new.txt": "new\n"}
    mine = write_source(tmp_path / "mine", **{"src/two.txt": "mine\n", "tools/ui/node_modules/x": "x"})
    monkeypatch.setenv("TQ_LLAMA_CPP_SRC", str(mine))
    before = times(target)
    assert made() == {**first, "src/two.txt": "mine\n"}
    same = str(target / "src" / "one.txt")
    assert times(target)[same] == before[same]
    monkeypatch.delenv("TQ_LLAMA_CPP_SRC")
    assert made() == second


def test_a_source_of_ones_own_must_be_llama_cpp(tmp_path, target, monkeypatch, capsys):
    monkeypatch.setenv("TQ_LLAMA_CPP_SRC", str(tmp_path))
    assert fetch.main([str(target)]) == 1
    assert "is not a llama.cpp source tree" in capsys.readouterr().err


def test_folders_may_be_relative_or_start_with_a_tilde(source, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("source", "~/source"):
        monkeypatch.setenv("TQ_LLAMA_CPP_SRC", name)
        assert fetch.main([str(target)]) == 0
        assert build.environment()["TQ_LLAMA_CPP_SRC"] == str(source)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the rule is the same on Linux only")
@pytest.mark.parametrize("chosen", [{}, {"XDG_CACHE_HOME": "/x"}, {"XDG_CACHE_HOME": "x"}, {"TQ_GGML_CACHE": "~/x"}])
def test_the_cache_folder_is_that_of_the_package(chosen, monkeypatch):
    for name in ("XDG_CACHE_HOME", "TQ_GGML_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert fetch.cache_folder() == packages.cache_dir() / "src"


def test_the_pin_is_the_same_everywhere():
    assert library.LLAMA_CPP_PYTHON == fetch.VERSION
    named = re.findall(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert named == [fetch.VERSION]


# ---- before a build ----


def test_preflight_names_the_command_for_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    assert preflight.main(["--venv"]) == 1
    said = capsys.readouterr().err
    assert "no C compiler" in said and "apt-get install -y build-essential" in said
    assert "no module ensurepip" in said and "apt-get install -y python3-venv" in said


def test_preflight_asks_only_for_what_the_build_needs(monkeypatch, capsys):
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(preflight, "NEEDED_BYTES", 1 << 60)
    assert preflight.main([]) == 1
    said = capsys.readouterr().err
    assert "no Python headers" in said and "MiB free" in said
    assert preflight.main(["--no-python", "--no-space"]) == 0


def test_a_build_tree_whose_programs_are_gone_is_known(tmp_path):
    cache = "CMAKE_COMMAND:INTERNAL={}\nCMAKE_MAKE_PROGRAM:FILEPATH={}\n"
    for program, usable in ((sys.executable, True), (str(tmp_path / "gone"), False)):
        (tmp_path / "CMakeCache.txt").write_text(cache.format(sys.executable, program))
        assert build.usable(tmp_path) is usable


def test_a_failed_build_shows_why_and_keeps_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "LOG", tmp_path / "build" / "build.log")
    # The program looks into its own log: what it said before must be there while it still runs.
    code = "import time; print('x.c:1: error: no', flush=True); time.sleep(0.5); print(open('build/build.log').read())"
    assert build.run("this", [sys.executable, "-c", code + "; exit(3)"]) == 3
    assert build.LOG.read_text().count("x.c:1: error: no") == 2
    said = capsys.readouterr().err
    assert "error: no" in said and "The whole output is in build/build.log" in said


# ---- what was built ----


def test_the_wheel_carries_each_library_once():
    names = [path.name for path in libraries()]
    kinds = sorted(name.split(".")[0] for name in names)
    assert kinds == ["libggml", "libggml-base", "libggml-cpu", "libggml-rpc", "libllama", "libtq"], names


def libraries() -> list[Path]:
    return [path for path in library.lib_dir().iterdir() if path.name != "LICENSE.llama.cpp"]


def test_the_libraries_find_each_other_from_their_own_folder():
    readelf = shutil.which("readelf")
    if readelf is None or not sys.platform.startswith("linux"):
        pytest.skip("needs readelf (binutils) and Linux")
    for path in libraries():
        said = subprocess.run([readelf, "-d", path], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", said) == ["$ORIGIN"], path.name


def test_the_built_ggml_answers_our_types():
    (path,) = library.lib_dir().glob("libggml-base.*")
    ggml_type_name = ctypes.CDLL(str(path)).ggml_type_name
    ggml_type_name.restype = ctypes.c_char_p
    assert [ggml_type_name(id_) for id_ in (43, 44)] == [b"tq3", b"tq4"]


def configured(folder: Path, native: str) -> str:
    """The compile commands of ggml-cpu, from a build tree that is configured and not built."""
    options = ["-DTQ_PYTHON=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [sys.executable, "-m", "cmake", "-S", ROOT / "c_src", "-B", folder, "-G", "Ninja", *options]
    done = subprocess.run([*command, f"-DTQ_NATIVE={native}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    commands = json.loads((folder / "compile_commands.json").read_text())
    ours = [entry["command"] for entry in commands if "/ggml-cpu.dir/" in entry.get("output", "")]
    assert len(ours) > 10, "ggml-cpu's files are not named as they were; mend this test"
    return "\n".join(ours)


def test_a_wheel_that_travels_asks_nothing_of_the_cpu_and_it_does_not_stick(tmp_path, monkeypatch):
    tree = build.build_tree()
    if tree is None:
        pytest.skip("nothing is built here, so there is no llama.cpp source to configure")
    # The source is there since that build.
    monkeypatch.setenv("TQ_GGML_CACHE", str(USERS_CACHE))
    portable = configured(tmp_path / "build", "OFF")
    assert not re.findall(r"-march=native|-mcpu=native|-mavx\S*|-mfma|-mf16c|-mbmi2|-msse4.2|-fopenmp", portable)
    native = configured(tmp_path / "build", "ON")
    assert re.search(r"-march=native|-mcpu=", native)
