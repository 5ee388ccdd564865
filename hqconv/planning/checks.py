"""Feasibility of a request: target, schema, parameter dtype and grid against Humming and the MoE layers."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hqconv.errors import InputError, RequestError, first_few, plural
from hqconv.formats.encoding import usable_scales
from hqconv.formats.source_format import why_not_direct
from hqconv.kernel_layout.compatibility import why_overflow
from hqconv.models.expert_map import ExpertMap
from hqconv.models.linear_layers import BY_COLUMNS, READ_IN
from hqconv.models.moe_layer import MoeLayer
from hqconv.models.source_protocol import Source
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas.artifact_names import (
    CARD,
    CHECKPOINT,
    CONFIG,
    DENSE_CONFIG,
    EXPERTS_FOLDER,
    GEMMS,
    INDEX,
    JOURNAL,
    KERNEL,
    MANIFEST,
    PARTIAL,
    SUMS,
    text_config,
)
from hqconv.schemas.engine import ENGINE, NO_HEADS, AttentionHeads
from hqconv.schemas.grid import PACK_UNIT, Grid, check_grid
from hqconv.schemas.input_schema import A16, InputSchema, KernelSpec, LayerSpec
from hqconv.schemas.tensors import FLOATS, TensorRef
from hqconv.schemas.weight_schema import PARAM_DTYPES, WeightSchema

# Two levels of scales: above those of groups, which e4m3 holds, a static one, the largest input / (6 * 448).
_TWO_LEVELS = "static_tensor_dynamic_group"
_OF_TWO_LEVELS = "float4e2m1"
_DYNAMIC = "Use an input schema whose scales are found while serving, such as fp8 or int8."
_BATCH = 256  # scales of a read
_READERS = 16  # reads at once: a file system far away answers late
_MAX_NAME = 255  # bytes, of most file systems
_MAX_PATH = 3072  # bytes, with room for the path of the output
_OURS = (CONFIG, INDEX, MANIFEST, JOURNAL, CARD, SUMS)
_CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "F4", "U8", "I8", "I32")


def check_request(
    experts: ExpertMap, spec: ConversionSpec, heads: AttentionHeads = NO_HEADS
) -> None:
    """Raise RequestError for a request that this version, Humming or the experts' sizes do not allow.

    heads: of the model, for the TP sizes that a message names. The rules of each GPU are in
    `kernel_layout.compatibility`; a conversion asks Humming itself.
    """
    _check_input_scales(experts, spec)
    for layer_spec in dict.fromkeys((spec.layer_spec, *spec.of_layers.values())):
        for kernel_spec in layer_spec.each:
            _check_scales(kernel_spec)
        if spec.layout == KERNEL:
            _check_layer_spec(layer_spec)
    if spec.layout == CHECKPOINT:
        _check_checkpoint_layout(experts, spec)
    for layer in experts.layers:
        _check_sizes(layer, spec, heads)
    if spec.dense and not experts.linear:
        plain = first_few([*(group.name for group in experts.left_linear), *experts.unknown_linear])
        raise RequestError(
            "No linear layer beside the experts can be quantized: --dense has nothing to do.",
            where="--dense",
            expected="linear layers in 16 or 32 bits; those that the source has quantized keep their codes",
            found=f"only {plain}, which stay as they are" if plain else "none",
            remedy="Convert without --dense.",
        )
    _check_dense_ranks(experts, spec)


def check_dense(source: Source, spec: ConversionSpec) -> None:
    """Raise RequestError where linear layers beside the experts cannot have the schemas that are asked for."""
    config = source.config
    model_type = config.get("model_type")
    is_dense = DENSE_CONFIG in (source.quantization or {})
    if is_dense or source.reference() is not None:
        raise RequestError(
            "Of this source no layers beside the experts can be quantized.",
            where="--dense",
            expected="a checkpoint",
            found="an artifact that was converted with --dense" if is_dense else "a GGUF file",
            remedy="Convert without --dense, or take the original checkpoint.",
        )
    if model_type not in READ_IN and text_config(config).get("model_type") not in READ_IN:
        raise RequestError(
            f"Which linear layers {ENGINE.name} fuses is not known for this model.",
            where="--dense, config.json: model_type",
            expected=", ".join(READ_IN),
            found=model_type,
            remedy="Convert the experts alone; a new model type needs a row in hqconv/models/linear_layers.py.",
        )
    for schema in spec.dense.used:
        layer_spec = replace(spec.layer_spec, schema=schema, inputs=A16)
        _check_scales(layer_spec.of("w13"))
        reason = ENGINE.linear_obstacle(schema, spec.param_dtype, spec.layout)
        if reason is not None:
            raise RequestError(
                "No server runs linear layers of this schema.",
                where=f"--dense {schema.name} --layout {spec.layout}",
                expected="a schema such as int8, fp8 or int4-g32",
                found=f"{ENGINE.release}: {reason}",
            )
        if spec.layout == KERNEL:
            _check_layer_spec(layer_spec)


def is_whole(group: MoeLayer, schema: WeightSchema, tp: int = 1) -> bool:
    """Return whether the matrices of a linear group, dealt to ranks by columns, are whole words and scale groups."""
    unit = math.lcm(PACK_UNIT, schema.weight_scale_group_size or 1)
    rows = (schema.weight_scale_group_size_n or 1) * (PACK_UNIT if schema.has_zero_point else 1)
    shapes = [group.shape(role) for role in group.roles]
    return all(n % rows == 0 and k % (unit * tp) == 0 for n, k in shapes)


def _check_dense_ranks(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse tensor parallel sizes that cut a scale group of a linear layer."""
    tp = ENGINE.attention_tp(spec.grid) if spec.layout == KERNEL else 1
    for group in experts.linear:
        schema = spec.layer_spec_of(group.name).schema.of("w13")
        is_dealt = group.name.rpartition(".")[2] in BY_COLUMNS
        if tp is None or not is_dealt or is_whole(group, schema, tp):
            continue
        fitting = [size for size in range(1, 65) if is_whole(group, schema, size)]
        raise RequestError(
            "Tensor parallel ranks would cut a scale group of a linear layer.",
            where=f"--dense {schema.name}, {group.name}",
            expected=f"tensor parallel sizes {', '.join(map(str, fitting))}",
            found=tp,
            remedy='Leave the layer as it is, by a recipe: [dense_layers."*'
            f'.{group.name.rpartition(".")[2]}"], schema = "none".',
        )


def refuse_unserved(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Raise RequestError for layers that no server computes with; one named server's limits are warnings."""
    for layer in experts.layers:
        for kernel_spec in spec.layer_spec_of(layer.name).each:
            if (reason := why_overflow(kernel_spec)) is not None:
                raise RequestError(
                    "No server runs these weights.",
                    where=f"--schema {kernel_spec.schema.name} --dtype {kernel_spec.param_dtype}, {layer.name}",
                    expected="a schema and a dtype that Humming's kernels compute with",
                    found=reason,
                    remedy="Use --dtype bfloat16, or convert it all the same with --allow-unserved.",
                )


def _check_checkpoint_layout(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse several schemas, ranks, and unquantized experts that an ignore list cannot name.

    The engine knows these by their layer's number.
    """
    if spec.of_layers:
        specs = dict.fromkeys((spec.layer_spec, *spec.of_layers.values()))
        found = "; ".join(f"{one.schema.name}, {one.inputs.name} activations" for one in specs)
        raise RequestError(
            "The checkpoint layout has one schema for all layers.",
            where="--layout checkpoint",
            found=found,
            remedy="Use --layout kernel.",
        )
    if spec.grid != Grid():
        raise RequestError(
            "The checkpoint layout is unsharded: it serves at any TP and EP.",
            where="--layout checkpoint",
            remedy="Leave out --tp, --tp-split, --ep, --expert-placement and --redundant-experts.",
        )
    for name in experts.left:
        if ENGINE.layer_pattern(name) is None:
            raise RequestError(
                "The checkpoint layout cannot say that these experts are left as they are.",
                where=f"--layout checkpoint, {name}",
                expected=f"experts of a numbered layer, which {ENGINE.name} knows by the same number",
                remedy="Use --layout kernel, or name a schema for them in a recipe.",
            )


def _check_scales(kernel_spec: KernelSpec) -> None:
    schema = kernel_spec.schema
    if schema.bs_dtype in PARAM_DTYPES and schema.bs_dtype != kernel_spec.param_dtype:
        raise RequestError(
            "A 16-bit scale dtype must be the parameter dtype.",
            where=f"schema {schema.name}: bs_dtype",
            expected=kernel_spec.param_dtype,
            found=schema.bs_dtype,
            remedy="Leave bs_dtype out of the schema, or change --dtype.",
        )


def _check_layer_spec(spec: LayerSpec) -> None:
    """Check that the weights of both GEMMs run with the activations on the target, and that their layout is known."""
    from hqconv.kernel_layout.transform import nearest, needs_cuda, why_not

    reasons = {one: reason for one in spec.each if (reason := why_not(one)) is not None}
    if reasons:
        runs = []
        for one in reasons:
            inputs, _ = nearest(one)
            runs += [f"{one.schema.name} with --input-schema {', '.join(inputs)}"] if inputs else []
        _, schemas = nearest(next(iter(reasons)))
        runs += (
            [f"{spec.inputs.name} activations with --schema {', '.join(schemas)}"]
            if schemas
            else []
        )
        is_pair = len(spec.each) > 1
        texts = [
            f"{one.schema.name}: {reason}" if is_pair else reason for one, reason in reasons.items()
        ]
        raise RequestError(
            f"Humming does not run this pair on {spec.target.name}: {'; '.join(texts)}.",
            where=f"--schema {spec.schema.name} --input-schema {spec.inputs.name}",
            expected=f"on {spec.target.name}: {'; '.join(runs)}"
            if runs
            else "a pair that runs there",
        )
    if spec.target.cuda is None and any(map(needs_cuda, spec.each)):
        raise RequestError(
            "The layout depends on the CUDA compiler that will serve.",
            where=f"--schema {spec.schema.name} --target {spec.target.name}",
            expected="--cuda, with that compiler's version",
            remedy="Add --cuda 13.0, or what `nvcc --version` says on the serving machine.",
        )


def is_served_with(tp: int, heads: AttentionHeads) -> bool:
    """Return whether the engine can share the model's attention heads among `tp` tensor parallel ranks."""
    return ENGINE.heads_obstacle(Grid(tp), heads) is None


def _check_sizes(layer: MoeLayer, spec: ConversionSpec, heads: AttentionHeads) -> None:
    sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
    schema = spec.layer_spec_of(layer.name).schema
    try:
        check_grid(
            layer.name,
            *sizes,
            schema,
            spec.grid,
            pads_last_rank=layer.pads_last_rank,
            is_served=lambda tp: is_served_with(tp, heads),
            can_split=spec.layout == KERNEL
            and ENGINE.inner_obstacle(layer.intermediate_size, spec.grid) is None,
        )
    except RequestError as error:
        of_blocks = [gemm for gemm in GEMMS if schema.of(gemm).weight_scale_type == "block"]
        formats = [(layer.format.of_gemm(gemm), schema.of(gemm)) for gemm in of_blocks]
        if formats and not any(
            why_not_direct(source, one, spec.param_dtype) for source, one in formats
        ):
            error.remedy += (
                " With --schema source the source's scales are repeated into smaller blocks."
            )
        raise


def _check_input_scales(experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse static scales that cannot be carried, or that the source lacks.

    Raises RequestError, or InputError for a tensor that holds something else than scales.
    """
    for kernel_spec in spec.kernel_specs:
        if kernel_spec.inputs.is_static:
            _check_static(kernel_spec, spec)
    for layer in spec.static_layers(experts):
        _check_source_scales(layer, spec.layer_spec_of(layer.name).inputs)
        for gemm, refs in layer.input_scales.refs.items():
            for ref in refs:
                _check_scale_tensor(ref, layer.input_scales.max_values[gemm])


def _check_static(kernel_spec: KernelSpec, spec: ConversionSpec) -> None:
    where = f"input schema {kernel_spec.inputs.name}"
    if spec.layout == CHECKPOINT:
        raise RequestError(
            f"From the checkpoint layout {ENGINE.name} cannot load static activation scales of experts.",
            where=where,
            remedy=f"Use --layout kernel. {_DYNAMIC}",
        )
    if kernel_spec.schema.rotation:
        raise RequestError(
            "Static activation scales were measured before activations are rotated: they would be wrong.",
            where=f"{where}, schema {kernel_spec.schema.name}: hadamard_block_size",
            expected=0,
            found=kernel_spec.schema.rotation,
            remedy=_DYNAMIC,
        )


def _check_source_scales(layer: MoeLayer, inputs: InputSchema) -> None:
    scales = layer.input_scales
    lacking = next((gemm for gemm in GEMMS if not scales.refs.get(gemm)), None)
    if lacking is not None:
        raise RequestError(
            "The source has no static activation scales.",
            where=f"{layer.name}: {lacking}, input schema {inputs.name}",
            expected=f"tensors such as {next(iter(scales.missing.get(lacking, ())), f'{layer.name}.….input_scale')}",
            found="none of them",
            remedy=_DYNAMIC,
        )
    is_two = inputs.input_quant_mode == _TWO_LEVELS
    if scales.a_dtype != inputs.a_dtype or is_two != (scales.a_dtype == _OF_TWO_LEVELS):
        raise RequestError(
            "The source's static activation scales were not measured for these activations.",
            where=f"{layer.name}, input schema {inputs.name}",
            expected=f"{inputs.a_dtype} activations with a static scale per tensor"
            f"{', and dynamic ones per group' * is_two}, by the config",
            found=scales.a_dtype or "none that the config declares",
            remedy=_DYNAMIC,
        )


def _check_scale_tensor(ref: TensorRef, max_values: int) -> None:
    count = math.prod(ref.shape)
    if ref.dtype not in FLOATS or not 1 <= count <= max_values:
        raise InputError(
            "A tensor is no activation scale.",
            where=f"tensor {ref.name}",
            expected=f"{' or '.join(FLOATS)}, {'one number' if max_values == 1 else f'1 to {max_values} numbers'}",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy="Check that the checkpoint is complete and that config.json belongs to it.",
        )


def check_matrix_scales(source: Source, layers: Sequence[MoeLayer]) -> tuple[str, ...]:
    """Read the scales that are one number for a matrix, and return a notice of those under which all weights are 0.

    Those of files that are on the Hub are checked when they are decoded. Raises InputError for one under which weights
    would be no numbers: an expert that calibration or training never used can have such a one.
    """
    scales = list(_matrix_scales(source, layers))
    if all(stored == 0 for *_, stored in scales):
        return ()  # files without data so far: headers alone are planned, and decoding refuses them
    zeros = []
    wrong = []
    for layer, ref, divides, stored in scales:
        is_zero, is_infinite = (
            (math.isinf(stored), stored == 0) if divides else (stored == 0, math.isinf(stored))
        )
        if is_infinite or math.isnan(stored) or stored < 0:
            wrong.append((layer, ref, divides, stored))
        elif is_zero:
            zeros.append(ref.name)
    if wrong:
        layer, ref, divides, stored = wrong[0]
        names = dict.fromkeys(one.name for one, *_ in wrong)
        raise InputError(
            "A scale is not usable: its weights would be no numbers.",
            where=ref.name,
            expected=usable_scales(divides=divides),
            found=f"{stored}; {len(wrong)} such scales in {', '.join(names)}"
            if len(wrong) > 1
            else stored,
            remedy="Get a good copy of the checkpoint, or leave the layer as it is, by a recipe: "
            f'[[override]], blocks = "{layer.name}", schema = "none".',
        )
    if not zeros:
        return ()
    return (f"{zeros[0]} makes all weights of its matrix 0 ({plural(len(zeros), 'such scale')}).",)


def _matrix_scales(
    source: Source, layers: Sequence[MoeLayer]
) -> Iterator[tuple[MoeLayer, TensorRef, bool, float]]:
    """Yield each scale of a matrix in the order of files: its layer, tensor, whether it divides, and its number."""
    found: dict[tuple[int, int], tuple[MoeLayer, TensorRef, bool]] = {}
    for layer in layers if source.listing is None else ():
        parts = [
            (role, part)
            for role in layer.slices
            for part in ("scale", "scale_2")
            if part in layer.slices[role] and _is_of_matrices(layer, role, part)
        ]
        for role, part in parts:
            divides = layer.format.of(role).divides(part)
            is_stacked = layer.slices[role][part].is_stacked
            for expert, of_role in enumerate(layer.sources):
                ref = of_role[role][part]
                name = f"{ref.name}, expert {expert}" if is_stacked else ref.name
                found[ref.file, ref.offset_bytes] = (layer, ref._replace(name=name), divides)
    if not found:
        return
    places = [found[key] for key in sorted(found)]
    buffers = [(ref, bytearray(ref.num_bytes)) for _, ref, _ in places]
    with ThreadPoolExecutor(_READERS, "hqconv-scales") as pool:
        list(
            pool.map(
                source.read_all_into,
                (buffers[i : i + _BATCH] for i in range(0, len(buffers), _BATCH)),
            )
        )
    for (layer, ref, divides), (_, data) in zip(places, buffers, strict=True):
        for number in _numbers(data, ref.dtype):
            yield layer, ref, divides, number


def _is_of_matrices(layer: MoeLayer, role: str, part: str) -> bool:
    """Return whether a part is one number for a matrix, maybe beside that of gate or up."""
    ref = layer.sources[0][role][part]
    fmt = layer.format.of(role)
    most = 2 if part == "scale_2" or fmt.group_n == fmt.group_k == 0 else 1
    return ref.dtype in FLOATS and 1 <= math.prod(ref.shape) <= most


def _numbers(data: bytearray, dtype: str) -> tuple[float, ...]:
    if dtype == "BF16":
        data = bytearray().join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    kind, size = ("e", 2) if dtype == "F16" else ("f", 4)
    return struct.unpack(f"<{len(data) // size}{kind}", data)


def check_copied(checkpoint: Source, experts: ExpertMap, spec: ConversionSpec) -> None:
    """Refuse the checkpoint layout where tensors that it copies are quantized: vLLM would take them for plain ones."""
    if spec.layout != CHECKPOINT or checkpoint.quantization is None:
        return
    refs = (checkpoint.tensors[name] for name in experts.copied)
    quantized = next(
        (ref for ref in refs if ref.dtype in _CODE_DTYPES and len(ref.shape) > 1), None
    )
    if quantized is not None:
        raise RequestError(
            "The checkpoint layout cannot hold this source: its other layers are quantized as well.",
            where=f"tensor {quantized.name}",
            expected="float tensors outside of the experts: the layout's config describes one quantization",
            found=quantized.dtype,
            remedy="Use --layout kernel, whose config keeps the source's quantization for the other layers.",
        )


def check_sidecar_files(other_files: Iterable[str], planned: Collection[str], layout: str) -> None:
    """Refuse a source whose other files would lie where the artifact's own are or come, or have no room for a name.

    planned: the files of tensors. Raises InputError that names the file.
    """
    names = list(other_files)
    taken = {*planned, *_OURS, *(name + PARTIAL for name in (*planned, *_OURS, *names))}
    # A folder may not lie where any file comes, and a file not where the artifact's folders come.
    folders = {folder.as_posix() for path in planned for folder in Path(path).parents}
    for path in names:
        above = {folder.as_posix() for folder in Path(path).parents}
        is_theirs = layout == KERNEL and path.split("/")[0] == EXPERTS_FOLDER
        if path in taken or path in folders or above & taken or is_theirs:
            raise InputError(
                "A file of the source has a name that the artifact needs.",
                where=path,
                expected="another name",
                remedy="Rename the file, or leave it out of the source.",
            )
        _check_length(path)


def _check_length(path: str) -> None:
    longest = max(len(part.encode()) for part in Path(path + PARTIAL).parts)
    for num_bytes, most in ((longest, _MAX_NAME), (len(path.encode()), _MAX_PATH)):
        if num_bytes > most:
            raise InputError(
                "The name of a file of the source is too long.",
                where=path,
                expected=f"at most {most} bytes",
                found=f"{num_bytes} bytes, with {PARTIAL} while it is written",
                remedy="Rename the file.",
            )
