"""The plan: every output file, every byte's place in it, from headers and config alone.

Legend: E experts, N output rows, K input columns, T tensor-parallel ranks, P expert-parallel ranks.

A plan is made of **groups**, each a set of files that is finished together (all ranks of one MoE block; one
shard of copied tensors). Execution only follows it: which experts to read, where each of their tensors goes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hqconv.experts.block import ExpertBlock
from hqconv.experts.map import ExpertMap
from hqconv.plan.checks import check_copied, check_request, request_warnings
from hqconv.schemas import artifact
from hqconv.schemas.dtypes import dtype_num_bits
from hqconv.schemas.families import text_config
from hqconv.schemas.grid import Grid, tp_share
from hqconv.schemas.target import PARAM_DTYPES, TargetSchema

if TYPE_CHECKING:
    from hqconv.backends.layout import KernelForm, TensorForm
    from hqconv.checkpoint.folder import Checkpoint, TensorRef

MAX_SHARD_BYTES = 5 * 10**9  # as transformers' save_pretrained


@dataclass(frozen=True)
class Request:
    """What the user asked for, resolved: everything that decides the bytes of the artifact.

    `must_be_direct` decides none: it refuses what cannot keep the source's codes and scales.
    """

    schema: TargetSchema
    param_dtype: str
    sm_version: int
    grid: Grid = field(default_factory=Grid)
    layout: str = artifact.KERNEL
    input_schema: str = "a16"
    must_be_direct: bool = False


@dataclass(frozen=True)
class OutTensor:
    """One tensor's place in an output file; `offset_bytes` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class OutFile:
    """One output safetensors file: its header, ready to write, and where its tensors go."""

    path: str
    header: bytes
    size_bytes: int
    tensors: dict[str, OutTensor]


@dataclass(frozen=True)
class Place:
    """Where one expert's part of one output tensor goes: `num_bytes` at `offset_bytes` of `files[file]`."""

    file: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)
class BlockGroup:
    """All output files of one MoE block."""

    block: ExpertBlock
    files: tuple[OutFile, ...]
    forms: dict[str, KernelForm]  # per GEMM; empty in the checkpoint layout
    expert_files: tuple[int, ...] = ()  # checkpoint layout: each expert's file

    @property
    def name(self) -> str:
        return self.block.name


@dataclass(frozen=True)
class CopyGroup:
    """One shard of tensors whose bytes do not change."""

    name: str
    files: tuple[OutFile, ...]
    refs: tuple[TensorRef, ...]


Group = BlockGroup | CopyGroup


@dataclass(frozen=True)
class Plan:
    """All there is to do. `weight_map` is the model index: tensor name to shard."""

    request: Request
    experts: ExpertMap
    groups: tuple[Group, ...]
    other_files: tuple[str, ...]
    weight_map: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        return tuple(g for g in self.groups if isinstance(g, BlockGroup))

    @cached_property
    def num_bytes_out(self) -> int:
        """Bytes of all safetensors files."""
        return sum(f.size_bytes for g in self.groups for f in g.files)

    @cached_property
    def num_bytes_experts(self) -> int:
        """Source bytes of all experts."""
        return sum(group.block.num_bytes for group in self.block_groups)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of expert tensors that each rank will load (kernel layout)."""
        totals = {artifact.rank_folder(t, p): 0 for t, p in self.request.grid.ranks}
        if self.request.layout != artifact.KERNEL:
            return {}
        for group in self.block_groups:
            for file in group.files:
                totals[file.path.rsplit("/", 1)[0]] += file.size_bytes
        return totals

    def fingerprint(self) -> dict[str, str]:
        """What a resumed run must agree on besides source and versions: request and output bytes' places."""
        digest = hashlib.sha256()
        for group in self.groups:
            for file in group.files:
                digest.update(f"{file.path}\0{file.size_bytes}\0".encode() + file.header)
        request = self.request
        options = {
            "--schema": request.schema.humming_fields(),
            "--dtype": request.param_dtype,
            "--target": f"sm{request.sm_version}",
            "--tp, --ep or the placement": vars(request.grid),
            "--layout": request.layout,
            "--input-schema": request.input_schema,
        }
        words = {key: json.dumps(value, sort_keys=True) for key, value in options.items()}
        return {**words, "layout of the output files": digest.hexdigest()}


def make_plan(checkpoint: Checkpoint, experts: ExpertMap, request: Request) -> Plan:
    """Plan a conversion. Raises RequestError where request, schema, grid and blocks do not fit together."""
    check_request(experts, request)
    check_copied(checkpoint, experts, request)
    shards: list[_Shard] = []
    groups: list[Group] = []
    if request.layout == artifact.KERNEL:
        groups = [_kernel_group(block, request) for block in experts.blocks]
    else:
        for block in experts.blocks:
            shards += _expert_shards(block, request)
    shards += _copy_shards([checkpoint.tensors[name] for name in experts.copied])
    weight_map: dict[str, str] = {}
    of_block: dict[str, list[tuple[_Shard, OutFile]]] = {}
    for index, shard in enumerate(shards, start=1):
        name = artifact.shard_name(index, len(shards)) if len(shards) > 1 else "model.safetensors"
        file = build_file(name, shard.specs, {"format": "pt"})
        weight_map |= dict.fromkeys(file.tensors, name)
        if shard.block is None:
            groups.append(CopyGroup(name, (file,), shard.refs))
        else:
            of_block.setdefault(shard.block.name, []).append((shard, file))
    sharded = [_sharded_group(parts) for parts in of_block.values()]
    return Plan(
        request=request,
        experts=experts,
        groups=(*sharded, *groups),
        other_files=checkpoint.other_files,
        weight_map=weight_map,
        warnings=request_warnings(experts, request),
    )


def default_param_dtype(config: Mapping[str, Any], experts: ExpertMap) -> str:
    """The parameter dtype a checkpoint implies: its config's, else its experts'; float32 becomes bfloat16."""
    for words in (config, text_config(config)):
        for key in ("torch_dtype", "dtype"):
            if words.get(key) in PARAM_DTYPES:
                return str(words[key])
            if words.get(key) == "float32":
                return "bfloat16"
    return "float16" if experts.blocks[0].dtype == "F16" else "bfloat16"


def build_file(path: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> OutFile:
    """Lay out a safetensors file: widest dtypes first, so that every tensor is aligned; header padded to 8."""
    ordered = sorted(specs, key=lambda spec: -dtype_num_bits(spec[1]))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, dtype, shape in ordered:
        begin, end = end, end + math.prod(shape) * dtype_num_bits(dtype) // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        spans.append((begin, end))
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors = {
        name: OutTensor(name, dtype, tuple(shape), len(header) + begin, stop - begin)
        for (name, dtype, shape), (begin, stop) in zip(ordered, spans, strict=True)
    }
    return OutFile(path, header, len(header) + end, tensors)


def kernel_places(group: BlockGroup, grid: Grid, tp_rank: int, expert: int) -> dict[str, list[Place]]:
    """Where one expert's kernel tensors of one TP rank go: `w13_weight`, … to a place in each of its homes."""
    places: dict[str, list[Place]] = {}
    for ep_rank, local in _homes(grid, group.block.num_experts)[expert]:
        index = tp_rank * grid.ep + ep_rank
        for name, tensor in group.files[index].tensors.items():
            size = tensor.num_bytes // tensor.shape[0]
            place = Place(index, tensor.offset_bytes + local * size, size)
            places.setdefault(name.removeprefix(f"{group.name}."), []).append(place)
    return places


def checkpoint_place(group: BlockGroup, expert: int, projection: str, tensor: str) -> Place:
    """Where one packed tensor of one expert's projection goes in the checkpoint layout."""
    index = group.expert_files[expert]
    out = group.files[index].tensors[_tensor_name(group.block, expert, projection, tensor)]
    return Place(index, out.offset_bytes, out.num_bytes)


def gemm_shapes(block: ExpertBlock, tp: int, schema: TargetSchema) -> dict[str, tuple[int, int]]:
    """(N, K) of each GEMM on every TP rank, before the kernel's padding."""
    share = tp_share(block.intermediate_size, tp, schema)
    return {"w13": ((2 if block.gated else 1) * share, block.hidden_size), "w2": (block.hidden_size, share)}


# --- groups ------------------------------------------------------------------------------------------------

TensorSpec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


@dataclass
class _Shard:
    """An ordinary model shard before it has a number."""

    specs: list[TensorSpec]
    refs: tuple[TensorRef, ...] = ()
    block: ExpertBlock | None = None
    num_experts: int = 0


@functools.lru_cache(maxsize=64)
def _homes(grid: Grid, num_experts: int) -> list[list[tuple[int, int]]]:
    return grid.homes(num_experts)


def _kernel_group(block: ExpertBlock, request: Request) -> BlockGroup:
    from hqconv.backends.layout import kernel_form

    forms = {
        gemm: kernel_form(n, k, request.schema, request.param_dtype, request.sm_version, block.has_bias)
        for gemm, (n, k) in gemm_shapes(block, request.grid.tp, request.schema).items()
    }
    files = []
    for tp_rank, ep_rank in request.grid.ranks:
        num_local = len(request.grid.local_experts(block.num_experts, ep_rank))
        specs = [
            (f"{block.name}.{gemm}_{name}", tensor.dtype, (num_local, *tensor.shape))
            for gemm, form in forms.items()
            for name, tensor in form.tensors.items()
        ]
        metadata = {"format": "pt", **{gemm: form.config_json(num_local) for gemm, form in forms.items()}}
        files.append(build_file(artifact.rank_file(block.name, tp_rank, ep_rank), specs, metadata))
    return BlockGroup(block, tuple(files), forms)


def _expert_shards(block: ExpertBlock, request: Request) -> list[_Shard]:
    """The checkpoint layout's shards of one block, cut between experts."""
    from hqconv.backends.layout import packed_form

    def form(n: int, k: int) -> dict[str, TensorForm]:
        return packed_form(n, k, request.schema, request.param_dtype, block.has_bias)

    inner, outer = block.intermediate_size, block.hidden_size
    forms = {p: form(outer, inner) if p == "w2" else form(inner, outer) for p in block.roles}
    expert_bytes = sum(t.num_bytes for tensors in forms.values() for t in tensors.values())
    per_shard = max(1, MAX_SHARD_BYTES // expert_bytes)
    shards = []
    for start in range(0, block.num_experts, per_shard):
        chosen = range(start, min(start + per_shard, block.num_experts))
        specs = [
            (_tensor_name(block, e, p, name), t.dtype, t.shape)
            for e in chosen
            for p, tensors in forms.items()
            for name, t in tensors.items()
        ]
        shards.append(_Shard(specs, block=block, num_experts=len(chosen)))
    return shards


def _sharded_group(parts: list[tuple[_Shard, OutFile]]) -> BlockGroup:
    block = parts[0][0].block
    assert block is not None
    expert_files = [i for i, (shard, _) in enumerate(parts) for _ in range(shard.num_experts)]
    return BlockGroup(block, tuple(file for _, file in parts), {}, tuple(expert_files))


def _tensor_name(block: ExpertBlock, expert: int, projection: str, tensor: str) -> str:
    return f"{block.module(expert, projection)}.{tensor}"


def _copy_shards(refs: list[TensorRef]) -> list[_Shard]:
    """Tensors to copy, in the source's order, cut into shards of at most MAX_SHARD_BYTES."""
    shards: list[list[TensorRef]] = []
    filled = MAX_SHARD_BYTES + 1
    for ref in refs:
        if filled + ref.num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(ref)
        filled += ref.num_bytes
    return [_Shard([(r.name, r.dtype, r.shape) for r in chosen], tuple(chosen)) for chosen in shards]
