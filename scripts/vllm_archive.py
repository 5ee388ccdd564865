"""Packs vLLM, and what it needs, into one archive: for a GPU machine without a network, where the scripts of this
folder then serve artifacts.

    make test-vllm                                          # makes .venv-vllm, whose list of packages is taken
    python scripts/vllm_archive.py OUT.tar.xz [--installed FILE]

There: `tar -xf OUT.tar.xz -C DIR; export PYTHONPATH=REPO:DIR VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0`.
torch, triton and numpy are that machine's; `--installed` names further packages that it has, one a line. hqconv's own
plugin is announced by a folder of metadata in the archive. vLLM's libraries hold code for many GPUs, 700 MB: the code
for others than `SM` is set to zeros, which take no place in the archive; kernels that exist as PTX alone (Marlin)
keep it. Left out: FlashAttention 2, DeepGEMM, FlashMLA, attention in fp8 or with heads of unusual sizes, and what a
server over the network needs.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.vllm_env import REPO, name_of

PYTHON, SM = "3.12", 90  # of that machine: its Python, and its GPU's architecture
THERE = ("torch", "triton", "numpy", "pip", "setuptools", "hqconv")
# Packages and files that no engine in one process group needs; found by blocking their import.
LEFT_OUT = "cryptography outlines-core rignore fastar fastapi-cli fastapi-cloud-cli"
DROPPED = re.compile(
    r"^vllm/(vllm-rs|_qutlass_C|_flashmla_|_flashkda_C|_deepselect_C|vllm_flash_attn/_vllm_fa2_C"
    r"|third_party/(deep_gemm/(include|_C_extension)|fmha_sm100))|^pycountry/locales|^mistral_common/data|/tests/|\.(h|hpp|cuh|js|css)$"
)
GROUP = "vllm.general_plugins"
KEPT = re.compile(r"^humming/")  # compiles with its headers
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
MAGIC = struct.pack(
    "<IHH", 0xBA55ED50, 1, 16
)  # of a fat binary: its version, and the bytes of its header
DOWNLOAD = "-m pip download --quiet --no-deps --only-binary=:all:"
PTX, MACHINE_CODE = 1, 2
EXECUTABLE = 0o111  # in the mode of a file
# In the names of attention kernels: fp8, and heads of 96, 256 and more columns.
UNUSED = re.compile(rb"float_e4m3|ILi(96|256)EEEEEELi|EEEEEELi(256|512)E")


class Code(NamedTuple):
    """Code for one architecture in a fat binary, at `begin` of a library."""

    kind: int
    sm: int
    begin: int
    size: int


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--installed", type=Path, help="file with names of packages that it has")
    a = parser.parse_args()
    names = a.installed.read_text(encoding="utf-8").split() if a.installed else []
    there = {name_of(name) for name in (*THERE, *LEFT_OUT.split(), *names)}
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        download(wanted(there), wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        for library in sorted(site.rglob("vllm/**/*.so")):
            data = bytearray(library.read_bytes())
            keep_only(data, SM, without=UNUSED if "flash_attn" in str(library) else None)
            library.write_bytes(data)
        for library in site.rglob("*.so"):
            subprocess.run(["strip", "--strip-unneeded", library], check=False, capture_output=True)
        announce_plugin(site)
        pack = (
            f"tar -C {site} --sort=name -cf - . | xz -T0 --block-size=64MiB -8 > {a.out.resolve()}"
        )
        subprocess.run(["bash", "-c", f"set -o pipefail; {pack}"], check=True)
    print(f"{a.out}: {a.out.stat().st_size / 1e6:.1f} MB")


def wanted(there: set[str]) -> list[str]:
    """`name==version` of what .venv-vllm has and that machine has not, and vLLM's own."""
    python = REPO / ".venv-vllm" / "bin" / "python"
    listed = subprocess.check_output(
        [python, "-m", "pip", "list", "--format=freeze"], text=True
    ).split()
    return [line for line in listed if "==" in line and name_of(line) not in there]


def download(lines: list[str], folder: Path) -> None:
    """Fetch the wheels of these packages for another Python."""
    command = [sys.executable, *DOWNLOAD.split()]
    command += ["-d", str(folder), "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, *lines], check=True)


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel without the parts that are left out."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if KEPT.search(name) or not DROPPED.search(name)
        ]
        archive.extractall(site, names)
        for name in names:  # programs, such as Humming's compiler
            if archive.getinfo(name).external_attr >> 16 & EXECUTABLE:
                (site / name).chmod(0o755)


def announce_plugin(site: Path) -> None:
    """Write the metadata by which vLLM finds the plugin of the repository in PYTHONPATH."""
    folder = site / "hqconv-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hqconv\nVersion: 0\n", encoding="ascii"
    )
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = project["entry-points"][GROUP]["hqconv"]
    entry = f"[{GROUP}]\nhqconv = {target}\n"
    (folder / "entry_points.txt").write_text(entry, encoding="ascii")


def keep_only(library: bytearray, sm: int, *, without: re.Pattern[bytes] | None = None) -> None:
    """Set to zeros the code for other GPUs, in place; of a fat binary without code for `sm` its latest PTX stays.

    without: code in which this is found goes too.
    """
    for codes in fat_binaries(library):
        mine = [one for one in codes if (one.kind, one.sm) == (MACHINE_CODE, sm)]
        texts = [one for one in codes if one.kind == PTX and one.sm <= sm]
        kept = mine or sorted(texts, key=lambda one: one.sm)[-1:]
        for one in codes:
            is_unused = without is not None and without.search(
                library, one.begin, one.begin + one.size
            )
            if one not in kept or is_unused:
                library[one.begin : one.begin + one.size] = bytes(one.size)


def fat_binaries(library: bytes | bytearray) -> Iterator[list[Code]]:
    """The codes of each fat binary in a library.

    A header of 16 bytes ends with the size of what follows: for each code its own header (kind, version, size of this
    header, size of the code; at 28 the architecture), then the code.
    """
    at = library.find(MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", library, at + 8)
        begin, end, codes = at + 16, at + 16 + size, []
        while begin < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", library, begin)
            (sm,) = struct.unpack_from("<I", library, begin + 28)
            codes.append(Code(kind, sm, begin + head, length))
            begin += head + length
        yield codes
        at = library.find(MAGIC, end)


if __name__ == "__main__":
    main()
