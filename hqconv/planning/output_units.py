"""Output safetensors files: their headers, and the offset of every tensor in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from hqconv.errors import plural
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.tensor_names import decoder_layer
from hqconv.planning.layer_encoding import LayerEncoding
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.schemas.grid import Grid, TpSlice, tp_share, tp_slices
from hqconv.schemas.tensors import TensorRef, TensorSpec, num_bits
from hqconv.schemas.weight_schema import LayerSchema

if TYPE_CHECKING:
    from hqconv.kernel_layout.transform import KernelForm


@dataclass(frozen=True)
class OutFile:
    """One output file: its path in the artifact, its header, ready to write, and the positions of its tensors."""

    path: str
    header: bytes = field(repr=False)
    size_bytes: int
    tensors: dict[str, TensorRef] = field(repr=False)


def build_file(
    path: str, specs: Iterable[TensorSpec | TensorRef], metadata: Mapping[str, str], number: int = 0
) -> OutFile:
    """Lay out a safetensors file: widest dtypes first, so that every tensor is aligned; header padded to 8.

    `number` is the file's index among the files of its output unit; the refs of its tensors have it.
    """
    specs = list(specs)
    width_of = {dtype: num_bits(dtype) for dtype in {spec.dtype for spec in specs}}
    if len(width_of) > 1:
        specs.sort(key=lambda spec: -width_of[spec.dtype])
    # The texts of names and of the few forms are encoded by json; a dict for each of a million tensors takes longer.
    entries = [f'"__metadata__":{_json_text(dict(metadata))}']
    sizes: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    begins: list[int] = []
    end = 0
    for spec in specs:
        form = (spec.dtype, spec.shape)
        known = sizes.get(form)
        if known is None:
            text = _json_text({"dtype": spec.dtype, "shape": spec.shape})[:-1]
            known = sizes[form] = (f'{text},"data_offsets":[', spec.num_bytes)
        begins.append(end)
        begin = end
        end = end + known[1]
        entries.append(f"{encode_basestring(spec.name)}:{known[0]}{begin},{end}]}}")
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    start = len(header)
    tensors = {
        spec.name: TensorRef(
            spec.name, spec.dtype, tuple(spec.shape), number, start + begin, spec.num_bytes
        )
        for spec, begin in zip(specs, begins, strict=True)
    }
    return OutFile(path, header, start + end, tensors)


def _json_text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


MAX_SHARD_BYTES = 5 * 10**9  # the limit of transformers' save_pretrained


@dataclass(frozen=True)
class MoeLayerPlan:
    """All output files of one MoE layer, with the slices and ranks that fill them.

    Kernel layout: one file a rank; `forms` are the kernel forms of its GEMMs, `slices` each TP rank's part of the
    intermediate size, and every expert is at `homes`.
    Checkpoint layout: ordinary shards; `forms` and `slices` are empty, and `expert_files` is each expert's file.
    """

    layer: MoeLayer
    encoding: LayerEncoding
    files: tuple[OutFile, ...]
    forms: dict[str, KernelForm]
    grid: Grid = field(default_factory=Grid)
    slices: tuple[TpSlice, ...] = ()
    expert_files: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Name the layer, its conversion and its files."""
        size = f"{plural(len(self.files), 'file')}, {sum(file.size_bytes for file in self.files)} bytes"
        return f"<MoeLayerPlan {self.name}: {self.encoding.conversion}, {size}>"

    @property
    def name(self) -> str:
        """The layer's name, which is also the output unit's."""
        return self.layer.name

    @property
    def num_bytes_read(self) -> int:
        """Source bytes of all experts."""
        return self.layer.num_bytes

    @cached_property
    def expert_bytes_out(self) -> int:
        """Upper bound of the bytes that are written of one expert, on all its ranks."""
        if not self.forms:
            total = sum(ref.num_bytes for file in self.files for ref in file.tensors.values())
            return -(-total // self.layer.num_experts)
        of_rank = sum(
            spec.num_bytes for form in self.forms.values() for spec in form.tensors.values()
        )
        return of_rank * len(self.slices) * max(len(homes) for homes in self.homes)

    @cached_property
    def _tensors(self) -> tuple[dict[str, TensorRef], ...]:
        """Tensors of every rank file by name: `w13_weight` …."""
        prefix = f"{self.name}."
        return tuple(
            {
                name.removeprefix(prefix): ref
                for name, ref in file.tensors.items()
                if not (self.forms and artifact_names.is_input_scale(name))
            }
            for file in self.files
        )

    @cached_property
    def homes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (EP rank, local index) pairs of each expert."""
        return self.grid.homes(self.layer.num_experts)

    def rank_tensors(self, tp_rank: int, ep_rank: int) -> dict[str, TensorRef]:
        """Return the tensors of one rank's file: `w13_weight`, …, with its experts along the first dimension."""
        return self._tensors[tp_rank * self.grid.ep + ep_rank]

    def input_scale_places(self) -> list[tuple[str, TensorRef]]:
        """Return every rank's position of each GEMM's static activation scale; empty without such scales."""
        return [
            (gemm, ref)
            for file in self.files
            for gemm in self.forms
            for name, ref in file.tensors.items()
            if artifact_names.is_input_scale(name) and name.startswith(f"{self.name}.{gemm}_")
        ]

    def neighbours(self, experts: Sequence[int]) -> dict[int, list[tuple[list[int], int]]]:
        """Return for each EP rank that holds some of `experts` the runs of experts that are adjacent in its tensors.

        A run is the experts' indices in `experts`, and the first expert's local index. A copy adds another run.
        """
        homes: dict[int, list[tuple[int, int]]] = {}
        for index, expert in enumerate(experts):
            for ep_rank, local in self.homes[expert]:
                homes.setdefault(ep_rank, []).append((local, index))
        return {ep_rank: _runs(sorted(of_rank)) for ep_rank, of_rank in homes.items()}

    def packed_place(self, expert: int, role: str, tensor: str) -> TensorRef:
        """Return the position of one packed tensor of one expert's projection in the checkpoint layout."""
        file = self.files[self.expert_files[expert]]
        return file.tensors[f"{self.layer.module(expert, role)}.{tensor}"]


@dataclass(frozen=True)
class LinearPlan:
    """The quantized linear layers of one decoder layer beside its experts, in one ordinary shard.

    groups: each as a layer of one expert, in the checkpoint layout.
    """

    name: str
    groups: tuple[MoeLayerPlan, ...]
    files: tuple[OutFile, ...]

    @property
    def num_bytes_read(self) -> int:
        """Source bytes of all matrices."""
        return sum(group.num_bytes_read for group in self.groups)


def _runs(places: Sequence[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """Group sorted (local index, index) pairs into runs of consecutive local indices."""
    runs: list[tuple[list[int], int]] = []
    for local, index in places:
        if runs and local == runs[-1][1] + len(runs[-1][0]):
            runs[-1][0].append(index)
        else:
            runs.append(([index], local))
    return runs


@dataclass(frozen=True)
class CopiedShardPlan:
    """One shard of tensors whose bytes do not change."""

    name: str
    files: tuple[OutFile, ...]
    refs: tuple[TensorRef, ...] = field(repr=False)

    @property
    def num_bytes_read(self) -> int:
        """Source bytes of all tensors."""
        return sum(ref.num_bytes for ref in self.refs)


OutputUnit = MoeLayerPlan | LinearPlan | CopiedShardPlan


def layers_of(unit: OutputUnit) -> tuple[MoeLayerPlan, ...]:
    """Return what is encoded of a unit: an MoE layer, linear groups, or nothing."""
    if isinstance(unit, LinearPlan):
        return unit.groups
    return (unit,) if isinstance(unit, MoeLayerPlan) else ()


def has_index(units: Iterable[OutputUnit], layout: str) -> bool:
    """Return whether an artifact has an index of its ordinary shards.

    Beside rank files even a single shard has one: without an index loaders take all safetensors files.
    """
    num_shards = sum("/" not in file.path for unit in units for file in unit.files)
    return num_shards > (1 if layout == artifact_names.CHECKPOINT else 0)


def gemm_shapes(layer: MoeLayer, tp: int, schema: LayerSchema) -> dict[str, tuple[int, int]]:
    """Return (N, K) of each GEMM on every TP rank, before the kernel's padding."""
    share = tp_share(layer.intermediate_size, tp, schema)
    return {
        "w13": ((2 if layer.gated else 1) * share, layer.hidden_size),
        "w2": (layer.hidden_size, share),
    }


def kernel_unit(layer: MoeLayer, spec: ConversionSpec) -> MoeLayerPlan:
    """Plan the rank files of one layer. As `expert_shards` it loads Humming, whose rules give the forms."""
    from hqconv.kernel_layout.transform import kernel_form

    layer_spec = spec.layer_spec_of(layer.name)
    forms = {
        gemm: kernel_form(n, k, layer_spec.of(gemm), layer.has_bias)
        for gemm, (n, k) in gemm_shapes(layer, spec.grid.tp, layer_spec.schema).items()
    }
    files = []
    inputs = layer_spec.inputs
    scales = [
        artifact_names.input_scale(layer.name, gemm, inputs) for gemm in forms if inputs.is_static
    ]
    for number, (tp_rank, ep_rank) in enumerate(spec.grid.ranks):
        num_local = len(spec.grid.local_experts(layer.num_experts, ep_rank))
        specs = [
            TensorSpec(f"{layer.name}.{gemm}_{name}", tensor.dtype, (num_local, *tensor.shape))
            for gemm, form in forms.items()
            for name, tensor in form.tensors.items()
        ]
        specs += [TensorSpec(name, "F32", (1,)) for name in scales]
        metadata = {"format": "pt", "rank": artifact_names.rank_name(tp_rank, ep_rank)}
        metadata |= {gemm: form.config_json(num_local) for gemm, form in forms.items()}
        files.append(
            build_file(
                artifact_names.rank_file(layer.name, tp_rank, ep_rank), specs, metadata, number
            )
        )
    slices = tp_slices(layer.intermediate_size, spec.grid, layer_spec.schema)
    return MoeLayerPlan(layer, spec.encoding_of(layer), tuple(files), forms, spec.grid, slices)


# --- ordinary shards ---------------------------------------------------------------------------------------


@dataclass
class Shard:
    """An ordinary model shard before it has a number: of experts in the checkpoint layout, or of copied tensors.

    groups: linear groups of one decoder layer.
    """

    specs: Sequence[TensorSpec | TensorRef]
    refs: tuple[TensorRef, ...] = ()
    layer: MoeLayer | None = None
    num_experts: int = 0
    groups: tuple[MoeLayer, ...] = ()


def expert_shards(layer: MoeLayer, spec: ConversionSpec) -> list[Shard]:
    """Return the checkpoint layout's shards of one layer, cut between experts."""
    first = packed_specs(layer, spec, range(1))
    expert_bytes = sum(tensor.num_bytes for tensor in first)
    per_shard = max(1, MAX_SHARD_BYTES // expert_bytes)
    shards = []
    for start in range(0, layer.num_experts, per_shard):
        chosen = range(start, min(start + per_shard, layer.num_experts))
        specs = packed_specs(layer, spec, chosen)
        shards.append(Shard(specs, layer=layer, num_experts=len(chosen)))
    return shards


def packed_specs(layer: MoeLayer, spec: ConversionSpec, experts: Iterable[int]) -> list[TensorSpec]:
    """Return the tensors of some experts in the checkpoint layout."""
    from hqconv.kernel_layout.transform import packed_form

    schema = spec.layer_spec_of(layer.name).schema
    dtype = spec.param_dtype
    forms = {
        role: packed_form(*layer.shape(role), schema.of(role), dtype, layer.has_bias)
        for role in layer.roles
    }
    return [
        TensorSpec(f"{layer.module(expert, role)}.{name}", tensor.dtype, tensor.shape)
        for expert in experts
        for role, tensors in forms.items()
        for name, tensor in tensors.items()
    ]


def linear_shards(groups: Iterable[MoeLayer], spec: ConversionSpec) -> list[Shard]:
    """Return a shard for the linear groups of each decoder layer."""
    by_place: dict[str, list[MoeLayer]] = {}
    for group in groups:
        by_place.setdefault(decoder_layer(group.name), []).append(group)
    return [
        Shard(
            [tensor for group in chosen for tensor in packed_specs(group, spec, range(1))],
            groups=tuple(chosen),
        )
        for chosen in by_place.values()
    ]


def copy_shards(refs: Iterable[TensorRef]) -> list[Shard]:
    """Cut tensors to copy, in the source's order, into shards of at most MAX_SHARD_BYTES."""
    shards: list[list[TensorRef]] = []
    filled = MAX_SHARD_BYTES + 1
    for ref in refs:
        if filled + ref.num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(ref)
        filled += ref.num_bytes
    return [Shard(chosen, tuple(chosen)) for chosen in shards]


def shard_units(
    shards: list[Shard], spec: ConversionSpec
) -> tuple[list[MoeLayerPlan | LinearPlan], list[CopiedShardPlan]]:
    """Number ordinary shards; return the units of layers, all shards of a layer in one unit, and the copied shards."""
    of_layer: dict[str, list[tuple[Shard, OutFile]]] = {}
    layers: list[MoeLayerPlan | LinearPlan] = []
    copies = []
    for index, shard in enumerate(shards, start=1):
        name = artifact_names.shard_name(index, len(shards))
        if shard.groups:
            file = build_file(name, shard.specs, {"format": "pt"})
            layers.append(_linear_plan(shard.groups, file, spec))
            continue
        siblings = [] if shard.layer is None else of_layer.setdefault(shard.layer.name, [])
        file = build_file(name, shard.specs, {"format": "pt"}, len(siblings))
        if shard.layer is None:
            copies.append(CopiedShardPlan(name, (file,), shard.refs))
        siblings.append((shard, file))
    for parts in of_layer.values():
        layer = parts[0][0].layer
        assert layer is not None
        expert_files = [
            number for number, (shard, _) in enumerate(parts) for _ in range(shard.num_experts)
        ]
        files = tuple(file for _, file in parts)
        layers.append(
            MoeLayerPlan(
                layer, spec.encoding_of(layer), files, {}, expert_files=tuple(expert_files)
            )
        )
    return layers, copies


def _linear_plan(groups: Iterable[MoeLayer], file: OutFile, spec: ConversionSpec) -> LinearPlan:
    plans = tuple(
        MoeLayerPlan(group, spec.encoding_of(group), (file,), {}, expert_files=(0,))
        for group in groups
    )
    return LinearPlan(decoder_layer(plans[0].name).rstrip("."), plans, (file,))
