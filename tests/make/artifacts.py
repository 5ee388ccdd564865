"""Conversions whose whole output is on record, and digests of a folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hqconv
from hqconv.errors import HqconvError
from tests.make import small
from tests.make.formats import FORMATS, write
from tests.make.gguf_models import write_recorded
from tests.make.matrices import SCHEMAS, SECOND_SCALES
from tests.make.qwen import write_qwen3_moe

GRIDS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2-ep3": {"tp": 2, "ep": 3, "expert_placement": "round_robin", "redundant_experts": 2},
    "checkpoint": {"layout": "checkpoint"},
}
UNEVEN: dict[str, tuple[Callable[[int], small.Source], tuple[str, ...]]] = {
    "gpt_oss_mxfp4": (small.gpt_oss_mxfp4, ("source", "fp8", "int4-g32")),
    "gpt_oss_floats": (small.gpt_oss_floats, ("mxfp4", "mxfp8", "int8")),
}  # whose last rank is padded
SOURCES: tuple[str, ...] = (
    "plain",
    *(f"format/{name}" for name in FORMATS),
    *(f"small/{name}" for name in small.GOOD),
    *(f"uneven/{name}" for name in UNEVEN),
    *(f"recut/{schema}" for schema in ("mxfp4", "nvfp4", "int4-g64-zp", "fp8-tensor", "fp8-block")),
    "second-scales",
    "split",
    *(f"gguf/{name}" for name in ("mixtral", "deepseek_v3")),
)
SPLIT = {
    "int4-g64": 2,
    "int4-g64-zp": 2,
    "mxfp4": 2,
    "nvfp4": 2,
    "mxfp8": 2,
}  # schema → ranks; of 96 columns


_SCHEMAS_OF = {
    "plain": SCHEMAS,
    "second-scales": SECOND_SCALES,
}  # of conversions of one plain model

_FIXED: dict[str, dict[str, dict[str, Any]]] = {
    "recut": {
        "tp1": {"schema": "source"},
        "tp2-ep3": {"schema": "source", **GRIDS["tp2-ep3"]},
        "int8": {"schema": "int8"},
    },
    "gguf": {
        "int8/tp2": {"schema": "int8", "tp": 2},
        "int4-g32/checkpoint": {"schema": "int4-g32", **GRIDS["checkpoint"]},
    },
}


class Record(NamedTuple):
    """Digests of one conversion: its source, its safetensors files, its other files. An error's name if refused."""

    source: str
    tensors: str
    documents: str


def make_source(name: str, folder: Path) -> Path:
    """Write a source of `SOURCES`."""
    kind, _, rest = name.partition("/")
    if kind == "format":
        return write(folder / rest, rest).folder
    if kind == "small":
        return small.save(folder / f"small-{rest}", small.GOOD[rest][0]())
    if kind == "uneven":
        return small.save(folder / rest, UNEVEN[rest][0](320))
    if kind == "gguf":
        return write_recorded(rest, folder / f"gguf-{rest}")
    if kind == "split":
        return write_qwen3_moe(
            folder / "split", hidden_size=256, intermediate_size=96, num_experts=5
        )
    plain = write_qwen3_moe(folder / "plain", hidden_size=256, intermediate_size=512, num_experts=5)
    if kind in _SCHEMAS_OF:
        return plain
    cut = folder / f"cut-{rest}"
    convert(plain, cut, schema=rest, tp=2, ep=2)
    return cut


def conversions_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conversions on record of one source: a name, and the options of `hqconv.convert`."""
    kind, _, rest = name.partition("/")
    if kind in _SCHEMAS_OF:
        for schema, dtype, grid in itertools.product(
            _SCHEMAS_OF[kind], ("bfloat16", "float16"), GRIDS
        ):
            yield f"{schema}/{dtype}/{grid}", {"schema": schema, "dtype": dtype, **GRIDS[grid]}
    elif kind == "format":
        yield "source", {"schema": "source"}
        yield FORMATS[rest].target, {"schema": FORMATS[rest].target, "tp": FORMATS[rest].tp}
        yield "nvfp4", {"schema": "nvfp4"}
    elif kind == "small":
        target = small.GOOD[rest][1]
        for grid, options in GRIDS.items():
            yield grid, {"schema": target, **options}
        yield "mxfp8", {"schema": "mxfp8", "tp": 2}
    elif kind == "uneven":
        for schema, dtype in itertools.product(UNEVEN[rest][1], ("bfloat16", "float16")):
            yield f"{schema}/{dtype}", {"schema": schema, "dtype": dtype, "tp": 4}
    elif kind == "split":
        for schema, tp in SPLIT.items():
            yield f"{schema}/tp{tp}", {"schema": schema, "tp": tp, "tp_split": "groups"}
        yield "int4-g64/tp1", {"schema": "int4-g64", "tp_split": "groups"}
    else:
        yield from _FIXED[kind].items()


def convert(src: Path, out: Path, **options: Any) -> None:
    """`hqconv.convert` for sm90, on the CPU unless the options say otherwise."""
    hqconv.convert(
        src,
        out,
        allow_unserved=True,
        **{"target": "sm90", "device": "cpu", "max_memory": "1GiB", "threads": 2, **options},
    )


def record(src: Path, out: Path, options: Mapping[str, Any]) -> Record:
    """Convert, and take digests of the result, which is removed."""
    source = _digest_of_source(src)
    try:
        convert(src, out, **options)
    except HqconvError as error:
        shutil.rmtree(out, ignore_errors=True)  # where only the values refuse, files were begun
        return Record(source, type(error).__name__, "")
    tensors = digest_of(out, is_tensors)
    documents = _digest_of_documents(out)
    shutil.rmtree(out)
    return Record(source, tensors, documents)


def is_tensors(path: Path) -> bool:
    """Whether a file holds tensors."""
    return path.suffix == ".safetensors"


def _digest_of_source(src: Path) -> str:
    """Digest of a source; of an artifact's tensors, since its documents change with hqconv."""
    return digest_of(src, is_tensors if (src / "hqconv.json").exists() else lambda _: True)


def _digest_of_documents(out: Path) -> str:
    """Digest of the files without tensors. Of the manifest without versions, digests and sentences."""
    manifest: dict[str, Any] = json.loads((out / "hqconv.json").read_bytes())
    for key in ("hqconv_version", "humming_kernels_version", "digest", "warnings", "files"):
        manifest.pop(key, None)
    for file in manifest["source"]["files"]:
        for key in ("sha256", "hub_sha256"):
            file.pop(key, None)
    total = hashlib.sha256(json.dumps(manifest).encode())
    others = ("hqconv.json", "README.md", "SHA256SUMS")
    total.update(
        digest_of(out, lambda path: path.name not in others and not is_tensors(path)).encode()
    )
    return total.hexdigest()[:32]


def digest_of(folder: Path, is_chosen: Callable[[Path], bool] = lambda _: True) -> str:
    """Digest of the chosen files' names and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and is_chosen(path):
            name = path.relative_to(folder).as_posix().encode()
            total.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]
