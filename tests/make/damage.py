"""Copies of good artifacts, and the means to damage them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hqconv.artifact.manifest import sealed
from hqconv.artifact.reader import Artifact
from hqconv.errors import VerificationError
from hqconv.kernel_layout.transform import gemm_tensors, kernel_form, to_kernel
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import gemm_shapes
from hqconv.quantization.quantized import stack_tensors
from hqconv.schemas.grid import Grid, tp_slices
from hqconv.sources.opening import open_source
from hqconv.verification.files import check_files
from hqconv.verification.result import CheckResult
from hqconv.verification.weights import check_weights
from tests.make.conversions import kernel_spec_of
from tests.make.kernel_tensors import array_operations
from tests.make.quantized import quantize

LAYER = "model.layers.0.mlp.experts"
GIB = 1 << 30
Tensors = dict[str, torch.Tensor]


@dataclass
class Damaged:
    """A copy of a good artifact, with the means to damage it."""

    root: Path
    source: Path
    schema: str

    @property
    def path(self) -> str:
        """The file that most mutations damage; it holds experts 2 and 3."""
        return self.rank_file(LAYER, 1, 1)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor → model shard, by the index."""
        index = json.loads((self.root / "model.safetensors.index.json").read_bytes())
        return dict(index["weight_map"])

    def rank_file(self, layer: str, tp_rank: int, ep_rank: int) -> str:
        return f"experts/tp{tp_rank}-ep{ep_rank}/{layer}.safetensors"

    # --- bytes

    def header(self, path: str) -> tuple[dict[str, Any], int]:
        data = (self.root / path).read_bytes()
        size = int.from_bytes(data[:8], "little")
        return json.loads(data[8 : 8 + size]), 8 + size

    def tensor_names(self, path: str) -> list[str]:
        return [name for name in self.header(path)[0] if name != "__metadata__"]

    def expert_bytes(self, path: str, name: str, local: int) -> np.ndarray:
        """One expert's bytes of one tensor, writable in place."""
        entries, begin = self.header(path)
        first, end = entries[name]["data_offsets"]
        experts = np.memmap(self.root / path, np.uint8, "r+", begin + first, (end - first,))
        return experts.reshape(entries[name]["shape"][0], -1)[local]

    def flip(self, path: str, name: str, local: int = 0, byte: int = 0, mask: int = 1) -> None:
        self.expert_bytes(path, name, local)[byte] ^= mask

    def swap_experts(self, path: str, gemms: tuple[str, ...]) -> None:
        for name in self.tensor_names(path):
            if name.rsplit(".", 1)[1].split("_")[0] in gemms:
                first, second = (self.expert_bytes(path, name, local) for local in (0, 1))
                kept = first.copy()
                first[:] = second
                second[:] = kept

    def swap_files(self, left: str, right: str, *, as_their_own: bool = True) -> None:
        """Exchange two ranks' experts, as if each had been made for the other; or the files as they are."""
        kept = (self.root / left).read_bytes()
        (self.root / left).write_bytes((self.root / right).read_bytes())
        (self.root / right).write_bytes(kept)
        for path in (left, right) if as_their_own else ():
            rank = path.split("/")[-2]
            self.edit_header(
                path, lambda entries, rank=rank: entries["__metadata__"].update(rank=rank)
            )

    def edit_header(self, path: str, edit: Callable[[dict[str, Any]], None]) -> None:
        entries, begin = self.header(path)
        data = (self.root / path).read_bytes()[begin:]
        edit(entries)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (self.root / path).write_bytes(len(text).to_bytes(8, "little") + text + data)

    # --- the manifest

    def edit_manifest(self, edit: Callable[[dict[str, Any]], None]) -> None:
        path = self.root / "hqconv.json"
        words = json.loads(path.read_bytes())
        edit(words)
        path.write_bytes(sealed(words))

    def reseal(self) -> None:
        """Make the manifest agree with the bytes again."""

        def edit(words: dict[str, Any]) -> None:
            for name, record in words["files"].items():
                data = (self.root / name).read_bytes()
                record |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

        self.edit_manifest(edit)

    # --- the checks

    def check(self, with_source: bool = True) -> tuple[CheckResult, CheckResult]:
        """(files, weights); of a manifest that cannot be read the one finding of `verify`, twice."""
        try:
            artifact = Artifact(self.root)
        except VerificationError as error:
            result = CheckResult("files")
            result.add(error.where, error.what, error.expected, error.found)
            return result, result
        with artifact, open_source(self.source) as source:
            given = source if with_source else None
            return check_files(artifact, given, 2), check_both_ways(artifact, given)

    # --- kernel tensors made anew

    def sources(self, expert: int) -> Tensors:
        """Role to matrix, of the first layer."""
        tensors = load_file(self.source / "model.safetensors")
        words = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        return {role: tensors[f"{LAYER}.{expert}.{word}.weight"] for role, word in words.items()}

    def rebuild(self, gemm: str, matrices: Tensors, tp_rank: int) -> None:
        """Overwrite the first expert of `tp{tp_rank}-ep1` by what Humming makes of the given matrices."""
        with Artifact(self.root) as artifact:
            layer, schema, request = (
                artifact.moe_layer(LAYER),
                artifact.manifest.layer_spec.schema,
                artifact.spec,
            )
        coupled = [role for role in ("w1", "w3") if role in matrices]
        packed = {}
        for roles in (coupled, ["w2"]):
            done = quantize(
                [matrices[role].contiguous() for role in roles], schema, request.param_dtype
            )
            packed |= {
                role: stack_tensors([one.tensors]) for role, one in zip(roles, done, strict=True)
            }
        cut = gemm_tensors(
            packed, schema, tp_slices(packed["w3"]["weight"].size(1), Grid(2), schema)[tp_rank]
        )[gemm]
        form = kernel_form(
            *gemm_shapes(layer, 2, schema)[gemm], kernel_spec_of(schema, request.param_dtype, 90)
        )
        path = self.rank_file(LAYER, tp_rank, 1)
        for name, tensor in to_kernel(form, cut).items():
            slot = self.expert_bytes(path, f"{LAYER}.{gemm}_{name}", 0)
            slot[:] = tensor.contiguous().flatten().view(torch.uint8).numpy()


def flip(path: Path, at: int = -1) -> None:
    """Turn one bit of a file round, and keep its size and time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def both_ways(out: Path, source: Path | None, device: str = "cpu") -> CheckResult:
    """`check_both_ways` of the artifact and the source in two folders."""
    with Artifact(out) as artifact:
        if source is None:
            return check_both_ways(artifact, None, device)
        with open_source(source) as opened:
            return check_both_ways(artifact, opened, device)


def check_both_ways(artifact: Artifact, source: Source | None, device: str = "cpu") -> CheckResult:
    """The weights check expert by expert, once it is shown that batches on a device (of torch's) find the same."""
    result = check_weights(artifact, source, None, 2, GIB)
    with array_operations():  # as on a GPU
        batched = check_weights(artifact, source, None, 2, GIB, torch.device(device))
    assert batched.findings == result.findings
    assert_same_figures(batched.measured, result.measured)
    is_good = not result.findings and artifact.manifest.is_kernel
    assert not is_good or f"on {device}" in batched.notes, (
        batched.notes
    )  # no expert was looked at again
    return result


def assert_same_figures(ours: Any, theirs: Any) -> None:
    """Equal words, numbers to 1e-9."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same_figures(ours[key], theirs[key])
    else:
        assert ours == (pytest.approx(theirs, rel=1e-9) if isinstance(ours, float) else theirs)


def found(result: CheckResult, *texts: str) -> None:
    """Assert that one finding holds all of the texts."""
    lines = [f"{f.where} | {f.what} | {f.expected} | {f.found}" for f in result.findings]
    assert any(all(text in line for text in texts) for line in lines), (texts, lines[:10])


def raw_and_resealed(copy: Damaged, paths: list[str]) -> CheckResult:
    """Raw damage shows in the digests of exactly `paths`; once resealed, `files` is content. Returns `weights`."""
    files, _ = copy.check(with_source=False)
    assert sorted(f.where for f in files.findings) == sorted(paths)
    assert {f.what for f in files.findings} == {
        "A file's bytes are not those the manifest records."
    }
    copy.reseal()
    files, weights = copy.check()
    assert files.findings == []
    return weights
