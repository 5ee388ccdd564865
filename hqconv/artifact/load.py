"""Python access to an artifact: tensors of one rank, experts as floats. Humming is imported only on demand."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.expert_reader import ExpertReader
from hqconv.artifact.rank_file import RankFile, check_sha256
from hqconv.artifact.reader import Artifact
from hqconv.artifact.tensor_filler import read_tensors
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.formats.encoding import resized
from hqconv.io.host_buffers import host_buffer
from hqconv.io.pipeline import pipeline
from hqconv.kernel_layout.compatibility import load_layer_config
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.scales import float_values
from hqconv.layout_decoder.values import decoded_weights, unrotated
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.dtypes import code_of

_NUM_THREADS = 8  # that hash files
# Decoded at once: of a GPU 256 MiB of float32, and a few times as much during decoding; on the CPU one expert.
_BATCH_WEIGHTS = {"cpu": 1, "cuda": 1 << 26}
_NUM_AHEAD = 2
Floats = dict[
    str, torch.Tensor
]  # one expert: w1 (if gated), w3 [I, H], w2 [H, I], and biases; float32


@dataclass(frozen=True)
class RankGemm:
    """One GEMM of one rank, ready for `humming.forward.humming_forward(gemm.layer_config(), inputs, **gemm.tensors)`.

    config: Humming's LayerConfig as a dict, from the rank file. tensors: `weight`, `weight_scale` … [E_local, …].
    hadamard_block_size: if not 0, weights are rotated, and `humming_forward` needs this argument as well.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    hadamard_block_size: int = 0

    def __repr__(self) -> str:
        """Name each tensor with its dtype and shape."""
        shown = ", ".join(
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for name, tensor in self.tensors.items()
        )
        return f"<RankGemm {shown}>"

    def layer_config(self) -> Any:
        """Return Humming's own LayerConfig; imports Humming without any change to it."""
        return load_layer_config(self.config)


def load_layer(
    path: str | Path,
    layer: str,
    tp_rank: int = 0,
    ep_rank: int = 0,
    device: str = "cpu",
    *,
    check_digests: bool = True,
) -> dict[str, RankGemm]:
    """Load one layer of one rank of a kernel artifact: `w13`, `w2` → LayerConfig and tensors on `device`.

    Raises RequestError where `path` is no kernel artifact or has no such layer or rank, VerificationError where a file
    is damaged or another rank's or layer's, or holds other numbers of experts, dtypes or a LayerConfig than the
    manifest implies.
    """
    with Artifact(Path(path), is_sealed=True) as artifact:
        _check_layer(artifact, layer)
        if not (tp_rank in range(artifact.grid.tp) and ep_rank in range(artifact.grid.ep)):
            raise RequestError(
                "The artifact has no such rank.",
                where=str(path),
                expected=f"tp rank < {artifact.grid.tp}, ep rank < {artifact.grid.ep}",
                found=f"tp {tp_rank!r}, ep {ep_rank!r}",
            )
        artifact.rank_forms(artifact.moe_layer(layer), refuse, [(tp_rank, ep_rank)])
        if check_digests:
            check_sha256(_local_file(artifact, layer, tp_rank, ep_rank))
        return load_rank(artifact, layer, tp_rank, ep_rank, device)


def load_rank(
    artifact: Artifact, layer: str, tp_rank: int, ep_rank: int, device: str
) -> dict[str, RankGemm]:
    """Load the GEMMs of an opened artifact's rank, read as a server would: straight from the file, unchanged."""
    file = _local_file(artifact, layer, tp_rank, ep_rank)
    found, schema = (
        read_tensors(file, file.tensors, torch.device(device)),
        artifact.schema_of(layer),
    )
    return {
        gemm: RankGemm(
            file.configs[gemm],
            {
                name.removeprefix(f"{gemm}_"): one
                for name, one in found.items()
                if name.startswith(f"{gemm}_")
            },
            schema.of(gemm).rotation,
        )
        for gemm in names.GEMMS
    }


def _local_file(artifact: Artifact, layer: str, tp_rank: int, ep_rank: int) -> RankFile:
    """Return a rank's file at its place on this machine; from the Hub it is downloaded first."""
    file = artifact.rank_file(layer, tp_rank, ep_rank)
    return replace(file, path=artifact.fetched(file.name))


def _check_layer(artifact: Artifact, layer: str) -> None:
    if not artifact.manifest.is_kernel:
        raise RequestError(
            "The checkpoint layout has no ranks.",
            where=str(artifact.root),
            remedy="Read its shards as any checkpoint's.",
        )
    if layer not in artifact.layers:
        raise RequestError(
            "The artifact has no such layer.",
            where=str(artifact.root),
            expected=", ".join(artifact.layers),
            found=layer,
        )


def dequantize(
    path: str | Path, layer: str, *, check_digests: bool = True
) -> dict[str, torch.Tensor]:
    """Return one layer's experts as float32, decoded from the kernel layout and joined from all ranks.

    Rotated weights are turned back, so that they compare with the source's.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError for an unknown layer, the checkpoint layout or short memory, VerificationError
    where a file is damaged.
    """
    with Artifact(Path(path), is_sealed=True) as artifact:
        _check_layer(artifact, layer)
        described = artifact.moe_layer(layer)
        reader = ExpertReader(artifact, described, refuse)
        if check_digests:
            files = (_local_file(artifact, layer, *rank) for rank in artifact.grid.ranks)
            with closing(pipeline(files, check_sha256, _NUM_THREADS, _NUM_THREADS)) as checked:
                for _ in checked:  # raises the first error
                    pass
        found: dict[str, torch.Tensor] = {}
        for expert in range(described.num_experts):
            for name, values in expert_floats(reader, expert).items():
                if not expert:
                    found[name] = _host_memory(
                        (described.num_experts, *values.shape), f"{layer}: {name}"
                    )
                found[name][expert] = values
    return found


def _host_memory(shape: tuple[int, ...], where: str) -> torch.Tensor:
    """Allocate float32 numbers. Raises RequestError where the system has no memory for them."""
    try:
        return torch.empty(shape)
    except RuntimeError as error:
        raise RequestError(
            "The memory is not enough for the experts in float32.",
            where=where,
            expected=f"{4 * math.prod(shape) / 2**30:.2f} GiB",
            found=str(error).split("\n")[0],
            remedy="Free memory, or load the kernel's tensors with hqconv.load.",
        ) from error


def decoded_experts(
    artifact: Artifact, layer: MoeLayer, device: torch.device, num_threads: int
) -> Generator[Floats, None, None]:
    """Yield the artifact's experts on the device: `w1` (if gated), `w3` [I, H], `w2` [H, I], and biases; float32.

    Rotated weights are turned back. Raises VerificationError for values that no conversion writes.
    """
    reader = ExpertReader(artifact, layer, refuse)

    def load(experts: range) -> list[Floats]:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                found = _load_batch(reader, experts, device)
            except HqconvError:  # the reading of single experts names the fault
                found = [None] * len(experts)
            each = zip(experts, found, strict=True)
            return [
                _load_alone(reader, expert, device) if one is None else one for expert, one in each
            ]

    size = max(
        1,
        _BATCH_WEIGHTS[device.type]
        // (len(layer.roles) * layer.hidden_size * layer.intermediate_size),
    )
    batches = (
        range(begin, min(begin + size, layer.num_experts))
        for begin in range(0, layer.num_experts, size)
    )
    with closing(
        pipeline(batches, load, _NUM_AHEAD, num_threads, runs_torch=True, name="hqconv-experts")
    ) as loaded:
        for experts in loaded:
            yield from experts


def _load_alone(reader: ExpertReader, expert: int, device: torch.device) -> Floats:
    return {name: values.to(device) for name, values in expert_floats(reader, expert).items()}


def _load_batch(reader: ExpertReader, experts: range, device: torch.device) -> list[Floats | None]:
    """Read experts at once; None for those with a fault."""
    stored = reader.plan(experts)
    host = host_buffer(stored.num_bytes, device)
    reader.fill(stored, host.numpy().data)
    stacks = reader.decode(stored, host.to(device, non_blocking=True))
    values = stack_floats(stacks, reader)
    wrong = torch.stack([stack.wrong for stack in stacks.values()]).any(0).tolist()
    return [
        None if is_wrong else {name: one[i] for name, one in values.items()}
        for i, is_wrong in enumerate(wrong)
    ]


def expert_floats(reader: ExpertReader, expert: int) -> dict[str, torch.Tensor]:
    """Return one expert of an opened artifact as float32: projections `w1` … and biases `b1` …, see `dequantize`."""
    stacks = {
        role: one for gemm in names.GEMMS for role, one in reader.read(gemm, expert, refuse).items()
    }
    return {name: values[0] for name, values in stack_floats(stacks, reader).items()}


def stack_floats(
    stacks: Mapping[str, DecodedStack], reader: ExpertReader
) -> dict[str, torch.Tensor]:
    """Return decoded projections by role as float32 with E in front: `w1` … and biases `b1` …, see `dequantize`."""
    found, param = {}, reader.artifact.param_dtype
    for role, stack in stacks.items():
        schema = reader.schema.of(role)
        shape = reader.layer.shape(role)  # without the zeros that fill the last scale group
        found[role] = resized(
            unrotated(decoded_weights(stack, schema, param), schema.rotation), shape
        )
        if stack.bias is not None:
            found["b" + role[1:]] = resized(float_values(stack.bias, code_of(param)), shape[:1])
    return found


def refuse(where: str, what: str, expected: object, found: object) -> None:
    """Raise the VerificationError for a fault that the `weights` check would list as a finding."""
    remedy = "Verify the artifact; where it is damaged, convert the original model again."
    raise VerificationError(what, where=where, expected=expected, found=found, remedy=remedy)
