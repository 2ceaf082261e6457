"""scripts/fetch_llama_cpp.py: patches fit or say why not, and applying them again changes nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import fetch_llama_cpp as fetch  # noqa: E402
import preflight  # noqa: E402

PATCH = """\
diff --git a/one.txt b/one.txt
--- a/one.txt
+++ b/one.txt
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


@pytest.fixture
def tree(tmp_path, monkeypatch):
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "0001-a.patch").write_text(PATCH)
    monkeypatch.setattr(fetch, "PATCHES", patches)
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "one.txt").write_text(TEXT)
    return folder


def test_a_patch_applies_once_however_often_it_runs(tree):
    fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == PATCHED
    before = (tree / "one.txt").stat().st_mtime_ns
    fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == PATCHED
    assert (tree / "one.txt").stat().st_mtime_ns == before, "an unchanged file must keep its time, or all is rebuilt"


def test_a_changed_patch_starts_from_the_original(tree):
    fetch.patch_tree(tree)
    patch = fetch.PATCHES / "0001-a.patch"
    patch.write_text(PATCH.replace("+ff", "+FF"))
    fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == PATCHED.replace("ff", "FF")
    patch.unlink()
    fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == TEXT


def test_moved_lines_are_found_and_changed_ones_refused(tree):
    (tree / "one.txt").write_text("new\nlines\n" + TEXT)
    fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == "new\nlines\n" + PATCHED


def test_a_source_that_changed_says_what_to_do(tree, capsys):
    (tree / "one.txt").write_text(TEXT.replace("b", "beta"))
    with pytest.raises(fetch.FetchError, match="does not fit one.txt near line 1.*docs/building.md"):
        fetch.patch_tree(tree)
    assert (tree / "one.txt").read_text() == TEXT.replace("b", "beta")


def test_a_missing_file_says_which(tree):
    (tree / "one.txt").unlink()
    with pytest.raises(fetch.FetchError, match="0001-a.patch changes one.txt"):
        fetch.patch_tree(tree)


def test_a_local_tree_must_be_llama_cpp(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQ_LLAMA_CPP_SRC", str(tmp_path))
    assert fetch.main([str(tmp_path / "out")]) == 1
    assert "is not a llama.cpp source tree" in capsys.readouterr().err


def built_tree() -> Path:
    trees = sorted((ROOT / "build").glob("*/llama.cpp-src"))
    if not trees:
        pytest.skip("nothing is built here, so there is no llama.cpp tree to try the patches on")
    return trees[-1]


def test_our_patches_fit_the_pinned_source_and_stay_small(tmp_path):
    source = built_tree()
    changed = 0
    for patch in sorted(fetch.PATCHES.glob("*.patch")):
        text = patch.read_text()
        changed += sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in text.splitlines() if line)
        for name, body in fetch.hunks(text).items():
            original = source / (name + ".tq-orig")
            assert original.is_file(), f"{name} was not patched by the build"
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, tmp_path / name)
            assert fetch.apply_hunks(name, original.read_text(), body) != original.read_text()
    assert changed < 100, f"{changed} changed lines: patches are for call sites only"


def test_a_local_tree_is_copied_and_never_changed(tmp_path, monkeypatch):
    source = tmp_path / "mine"
    for name in ("ggml/include/ggml.h", "src/x.cpp"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("// mine\n")
    monkeypatch.setenv("TQ_LLAMA_CPP_SRC", str(source))
    monkeypatch.setattr(fetch, "PATCHES", tmp_path / "none")
    assert fetch.main([str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "src" / "x.cpp").read_text() == "// mine\n"
    assert (source / "src" / "x.cpp").read_text() == "// mine\n"


def test_preflight_names_the_command_for_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    assert preflight.main() == 1
    said = capsys.readouterr().err
    assert "no C compiler" in said and "apt-get install -y build-essential" in said


def test_preflight_names_missing_headers_and_space(monkeypatch, capsys):
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(preflight, "NEEDED_BYTES", 1 << 60)
    assert preflight.main() == 1
    said = capsys.readouterr().err
    assert "no Python headers" in said and "MiB free" in said
