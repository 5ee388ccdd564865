"""Python access to an artifact: tensors of one rank, experts as floats. Humming is imported only on demand."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.expert_reader import ExpertReader, read_packed_expert
from hqconv.artifact.rank_file import RankFile
from hqconv.artifact.reader import Artifact
from hqconv.artifact.tensor_filler import check_digests as check_digests_of
from hqconv.artifact.tensor_filler import read_tensors
from hqconv.errors import HqconvError, RequestError, VerificationError
from hqconv.formats.encoding import resized
from hqconv.io.pipeline import host_buffer, pipeline
from hqconv.kernel_layout.compatibility import load_layer_config
from hqconv.layout_decoder.decode import DecodedStack, decoded_weights, unrotated
from hqconv.layout_decoder.scales import float_values
from hqconv.models.linear_layers import LinearGroup
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas.artifact_names import GEMMS
from hqconv.schemas.tensors import code_of, torch_dtype

_NUM_THREADS = 8
# Decoded at once: of a GPU 256 MiB of float32, and a few times as much during decoding; on the CPU one expert.
_BATCH_WEIGHTS = {"cpu": 1, "cuda": 1 << 26}
_NUM_AHEAD = 2
# one expert: w1 (if gated), w3 [I, H], w2 [H, I], and biases; float32
Floats = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankGemm:
    """One GEMM of one rank, ready for `humming.forward.humming_forward(gemm.layer_config(), inputs, **gemm.tensors)`.

    config: Humming's LayerConfig as a dict, from the rank file. tensors: `weight`, `weight_scale` … [E_local, …].
    hadamard_block_size: if not 0, weights are rotated, and `humming_forward` needs this argument as well.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    hadamard_block_size: int

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
                where=path,
                expected=f"tp rank < {artifact.grid.tp}, ep rank < {artifact.grid.ep}",
                found=f"tp {tp_rank!r}, ep {ep_rank!r}",
            )
        artifact.rank_forms(artifact.moe_layer(layer), refuse, [(tp_rank, ep_rank)])
        if check_digests:
            check_digests_of([_local_file(artifact, layer, tp_rank, ep_rank)])
        return load_rank(artifact, layer, tp_rank, ep_rank, device)


def load_rank(
    artifact: Artifact, layer: str, tp_rank: int, ep_rank: int, device: str
) -> dict[str, RankGemm]:
    """Load the GEMMs of an opened artifact's rank, read as a server would: straight from the file, unchanged."""
    file = _local_file(artifact, layer, tp_rank, ep_rank)
    tensors = read_tensors(file, file.tensors, torch.device(device))
    schema = artifact.schema_of(layer)
    gemms = {}
    for gemm, config in file.configs.items():
        own = {
            name.removeprefix(f"{gemm}_"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{gemm}_")
        }
        gemms[gemm] = RankGemm(config, own, schema.of(gemm).rotation)
    return gemms


def _local_file(artifact: Artifact, layer: str, tp_rank: int, ep_rank: int) -> RankFile:
    """Return a rank's file at its place on this machine; from the Hub it is downloaded first."""
    file = artifact.rank_file(layer, tp_rank, ep_rank)
    return replace(file, path=artifact.fetched(file.name))


def _check_layer(artifact: Artifact, layer: str) -> None:
    if not artifact.manifest.is_kernel:
        raise RequestError(
            "The checkpoint layout has no ranks.",
            where=artifact.root,
            remedy="Read its shards as any checkpoint's.",
        )
    if layer not in artifact.layers:
        raise RequestError(
            "The artifact has no such layer.",
            where=artifact.root,
            expected=", ".join(artifact.layers),
            found=layer,
        )


def dequantize(
    path: str | Path, layer: str, *, check_digests: bool = True
) -> dict[str, torch.Tensor]:
    """Return one layer's experts as float32, decoded from the kernel layout and joined from all ranks.

    Of a quantized linear layer beside the experts, by its name in the source: `weight` [N, K]. Rotated weights are
    turned back, so that they compare with the source's.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError for an unknown layer or the checkpoint layout, VerificationError
    where a file is damaged.
    """
    with Artifact(Path(path), is_sealed=True) as artifact:
        for name in artifact.manifest.linear_layers or ():
            if layer.rpartition(".")[0] == name.rpartition(".")[0]:
                group = artifact.linear_group(name)
                modules = {group.module(0, role): role for role in group.roles}
                if layer in modules:
                    digests = check_digests
                    weights = linear_weights(artifact, group, check_digests=digests)
                    return {"weight": weights[modules[layer]]}
        _check_layer(artifact, layer)
        moe_layer = artifact.moe_layer(layer)
        artifact.rank_forms(moe_layer, refuse)
        if check_digests:
            check_digests_of(_local_file(artifact, layer, *rank) for rank in artifact.grid.ranks)
        found: dict[str, torch.Tensor] = {}
        experts = decoded_experts(artifact, moe_layer, torch.device("cpu"), _NUM_THREADS)
        with closing(experts):
            for expert, floats in enumerate(experts):
                for name, values in floats.items():
                    if name not in found:
                        found[name] = torch.empty(moe_layer.num_experts, *values.shape)
                    found[name][expert] = values
    return found


def linear_weights(
    artifact: Artifact, group: LinearGroup, *, check_digests: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weights of a linear group by role, float32 [N, K]. Raises VerificationError for damaged files."""
    shards = artifact.shards()
    schema = artifact.schema_of(group.name).of("w13")
    found = {}
    for role in group.roles:
        name = f"{group.module(0, role)}.weight"
        path = shards.get(name, "")
        expected = artifact.manifest.files[path].sha256 if path else "a tensor of this name"
        sha256 = artifact.digest_of(path) if path and check_digests else expected
        if not path or sha256 != expected:
            refuse(path or name, "A file is damaged.", expected, sha256 if path else "none")
        stack = read_packed_expert(artifact, group, role, 0, shards, refuse)
        assert stack is not None
        if bool(stack.wrong.any()):
            refuse(name, "The weights have values that no conversion writes.", "", "")
        found[role] = decoded_weights(stack, schema, artifact.param_dtype)[0]
    return found


def packed_linear(
    artifact: Artifact, group: LinearGroup, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the packed tensors of a linear group on a device: those of its modules one above the other."""
    shards = artifact.shards()
    each: dict[str, list[torch.Tensor]] = {}
    for role in group.roles:
        dtypes, arrays = artifact.read_module(f"{group.module(0, role)}.", shards)
        for name, array in arrays.items():
            if name != "bias":
                flat = torch.from_numpy(array.reshape(-1).view("uint8"))
                tensor = flat.view(torch_dtype(dtypes[name])).view(array.shape)
                each.setdefault(name, []).append(tensor.to(device))
    return {
        name: tensors[0] if tensors[0].numel() == 1 else torch.cat(tensors)
        for name, tensors in each.items()
    }


def entered(device: torch.device) -> AbstractContextManager[object]:
    """Context in which kernels are launched on the device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def decoded_experts(
    artifact: Artifact, layer: MoeLayer, device: torch.device, num_threads: int
) -> Generator[Floats, None, None]:
    """Yield the artifact's experts on the device: `w1` (if gated), `w3` [I, H], `w2` [H, I], and biases; float32.

    Rotated weights are turned back. Raises VerificationError for values that no conversion writes.
    """
    reader = ExpertReader(artifact, layer, refuse)

    def load(experts: range) -> list[Floats]:
        with entered(device):
            with suppress(HqconvError):  # the reading of single experts names the fault
                if (floats := _load_batch(reader, experts, device)) is not None:
                    return floats
            return [_load_alone(reader, expert, device) for expert in experts]

    num_weights = len(layer.roles) * layer.hidden_size * layer.intermediate_size
    size = max(1, _BATCH_WEIGHTS[device.type] // num_weights)
    batches = (
        range(begin, min(begin + size, layer.num_experts))
        for begin in range(0, layer.num_experts, size)
    )
    with closing(
        pipeline(batches, load, _NUM_AHEAD, num_threads, runs_torch=True, name="hqconv-experts")
    ) as loaded:
        for experts in loaded:
            yield from experts


def _load_batch(reader: ExpertReader, experts: range, device: torch.device) -> list[Floats] | None:
    """Read experts at once; None if one has a fault."""
    stored = reader.plan(experts)
    host = host_buffer(stored.num_bytes, device)
    reader.fill(stored, host.numpy().data)
    stacks = reader.decode(stored, host.to(device, non_blocking=True))
    if bool(torch.stack([stack.wrong for stack in stacks.values()]).any()):
        return None
    floats = stack_floats(stacks, reader)
    return [{name: values[i] for name, values in floats.items()} for i in range(len(experts))]


def _load_alone(reader: ExpertReader, expert: int, device: torch.device) -> Floats:
    """Read one expert. Raises the VerificationError that names a fault."""
    stacks: dict[str, DecodedStack] = {}
    for gemm in GEMMS:
        stacks |= reader.read(gemm, expert, refuse)
    return {name: values[0].to(device) for name, values in stack_floats(stacks, reader).items()}


def stack_floats(
    stacks: Mapping[str, DecodedStack], reader: ExpertReader
) -> dict[str, torch.Tensor]:
    """Return decoded projections by role as float32 with E in front: `w1` … and biases `b1` …, see `dequantize`."""
    found = {}
    param = reader.artifact.param_dtype
    for role, stack in stacks.items():
        schema = reader.schema.of(role)
        shape = reader.layer.shape(role)  # without the zeros that fill the last scale group
        weights = unrotated(decoded_weights(stack, schema, param), schema.rotation)
        found[role] = resized(weights, shape)
        if stack.bias is not None:
            found["b" + role[1:]] = resized(float_values(stack.bias, code_of(param)), shape[:1])
    return found


def refuse(where: str, what: str, expected: object, found: object) -> None:
    """Raise the VerificationError for a fault that the `weights` check would list as a finding."""
    raise VerificationError(
        what,
        where=where,
        expected=expected,
        found=found,
        remedy="Verify the artifact; where it is damaged, convert the original model again.",
    )
