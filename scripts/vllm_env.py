"""Makes .venv-vllm: vLLM's own Python code on a machine without a GPU, for `make test-vllm`.

vLLM's wheel asks for a CUDA build of torch and gigabytes of GPU libraries. Its classes need neither to be built, loaded
and asked, so the wheel is unpacked without its compiled extensions, and of what it requires only that is installed
which is Python or small. Nothing of hqconv depends on vLLM; this is for tests alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VLLM = "0.33.0"
# What vLLM requires and no test needs: GPU libraries, compilers, readers of media; and what constraints.txt pins.
LEFT_OUT = re.compile(
    r"certifi|torch|torchaudio|torchvision|torchcodec|pynvvideocodec|flashinfer-.*|tilelang|nvidia-.*|nvtx|fastsafetensors"
    r"|instanttensor|quack-kernels|tokenspeed-mla|humming-kernels|numba|opentelemetry-.*|xgrammar|apache-tvm-ffi"
)
OTHER_MACHINE = 'platform_machine == "s390x"'
# Imported by name, but their own needs (a CUDA torch) are not.
WITHOUT_NEEDS = ("xgrammar", "apache-tvm-ffi")
MORE = ("uvloop", "uvicorn", "python-multipart", "opentelemetry-api", "opentelemetry-sdk")


def main() -> None:
    """Make the environment, or leave it as it is where it is complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=REPO / ".venv-vllm")
    parser.add_argument("--version", default=VLLM, help="of vLLM")
    args = parser.parse_args()
    folder = args.folder
    stamp = folder / f".vllm-{args.version}"
    if stamp.is_file():
        return
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    torch_pin = next(line for line in _constraints() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(Path(scratch), args.version)
        required: list[str] = []
        pinned: list[str] = []
        for line in _requirements(wheel):
            (pinned if name_of(line) in WITHOUT_NEEDS else required).append(line)
        subprocess.check_call([*pip, torch_pin])
        subprocess.check_call([*pip, torch_pin, *required, *MORE])
        subprocess.check_call([*pip, "--no-deps", *pinned])
        humming_pin = next(line for line in _constraints() if line.startswith("humming-kernels=="))
        compiler = humming_pin.replace("==", "[cu13]==")  # which needs no GPU
        subprocess.check_call(
            [*pip, torch_pin, "-e", f"{REPO}[gguf]", compiler, "pytest", "hypothesis"]
        )
        _unpack(wheel, next((folder / "lib").glob("python*")) / "site-packages")
    stamp.touch()


def _constraints() -> list[str]:
    return (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()


def _download(scratch: Path, version: str) -> Path:
    """vLLM's wheel for Linux on x86-64, whatever the machine is: only its Python code is used."""
    words = "-m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --abi=abi3"
    words += " --platform=manylinux_2_28_x86_64 --platform=manylinux_2_31_x86_64"
    command = [sys.executable, *words.split(), "--dest", str(scratch), f"vllm=={version}"]
    subprocess.check_call(command)
    return next(scratch.glob("vllm-*.whl"))


def _requirements(wheel: Path) -> Iterator[str]:
    """The wheel's own requirements, less those that are left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    for line in lines:
        requirement, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
        is_needed = "extra ==" not in marker and marker.strip() != OTHER_MACHINE
        if not (line.startswith("Requires-Dist: ") and is_needed):
            continue
        if name_of(requirement) in WITHOUT_NEEDS or not LEFT_OUT.fullmatch(name_of(requirement)):
            yield line.removeprefix("Requires-Dist: ")


def name_of(requirement: str) -> str:
    """The package that a line of pip names, as pip compares names."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _unpack(wheel: Path, site: Path) -> None:
    """Everything but compiled extensions."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".so"):
                archive.extract(info, site)


if __name__ == "__main__":
    main()
