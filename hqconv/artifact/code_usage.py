"""Counts of the codes, zero points and scales (by their power of two) that an artifact's experts use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hqconv.artifact.expert_reader import ExpertReader, read_packed_expert
from hqconv.artifact.load import refuse
from hqconv.artifact.manifest import Manifest
from hqconv.artifact.reader import Artifact
from hqconv.errors import RequestError
from hqconv.layout_decoder.decode import DecodedStack
from hqconv.layout_decoder.values import code_table, decoded_rows
from hqconv.models.moe_layer import MoeLayer
from hqconv.schemas import artifact_names as names
from hqconv.schemas.weight_schema import WeightSchema

WEIGHTS_READ = 1 << 26  # limit without a given number of experts: half a second of a processor
MatrixReader = Callable[[int], Iterator[tuple[str, DecodedStack]]]  # expert → projections and their matrices, E = 1


@dataclass
class CodeCounts:
    """Counts of one projection under one schema. codes, zero_points: int64 [256]; scales: power of two → count.

    Scales are counted by their magnitude. num_zero, num_negative, num_odd: scales that are zero, negative, not finite.
    finite number.
    """

    codes: Any = field(default_factory=lambda: np.zeros(256, np.int64))
    zero_points: Any = field(default_factory=lambda: np.zeros(256, np.int64))
    scales: Counter[int] = field(default_factory=Counter)
    num_zero: int = 0
    num_negative: int = 0
    num_odd: int = 0

    def add(self, other: CodeCounts) -> None:
        """Add the counts of another object."""
        self.codes += other.codes
        self.zero_points += other.zero_points
        self.scales.update(other.scales)
        self.num_zero += other.num_zero
        self.num_negative += other.num_negative
        self.num_odd += other.num_odd

    def to_dict(self, schema: WeightSchema) -> dict[str, Any]:
        """Return the JSON document; `codes`: [value of the code, count], from the least to the largest value."""
        values = code_table(schema)[: 1 << schema.num_bits]
        order = np.lexsort((~np.signbit(values), values))  # minus zero before zero
        has_zero = schema.has_zero_point and not schema.is_fp_zero_point
        return {
            "codes": [[float(values[code]), int(self.codes[code])] for code in order],
            "scales": [[power, self.scales[power]] for power in sorted(self.scales)],
            "zero_points": self.zero_points[: 1 << schema.num_bits].tolist() if has_zero else [],
            "num_zero_scales": self.num_zero,
            "num_negative_scales": self.num_negative,
            "num_odd_scales": self.num_odd,
        }


def read_usage(
    root: Path, num_experts: int | None = None, num_threads: int = 1, *, manifest: Manifest | None = None
) -> dict[str, Any]:
    """Count over experts of every layer; return the JSON document of docs/usage.md.

    num_experts: of each layer, evenly spread; None: all, or so many that about WEIGHTS_READ weights are read, which may
    leave layers out. num_threads: experts read at once; the result does not depend on it. manifest: the artifact's, if
    it was read before.

    Returns `schemas` (schema → projection → `CodeCounts.to_dict`), `rms` (layer → projection → root mean square of each
    expert's decoded weights, None for experts that were not read; layers without any are absent), `experts_read`,
    `layers_read` and `weights_read`, and `experts` and `layers` in all. Raises RequestError where `root` is no artifact
    or `num_experts` is invalid, VerificationError where a file is damaged.
    """
    if num_experts is not None and num_experts < 1:
        what, expected = "No expert would be read.", "a whole number from 1 on; 0 for a report without counts"
        raise RequestError(what, where="--sample", expected=expected, found=num_experts)
    with Artifact(root, manifest=manifest) as artifact:
        layers = [artifact.moe_layer(name) for name in artifact.layers]
        chosen = _choose(artifact, layers, num_experts)
        used: dict[str, dict[str, CodeCounts]] = {}
        rms: dict[str, dict[str, list[float | None]]] = {}
        schemas: dict[str, WeightSchema] = {}
        tasks: list[tuple[str, str, int, MatrixReader]] = []
        for layer in layers:
            if layer.name not in chosen:
                continue
            schema = artifact.schema_of(layer.name)
            schemas[schema.name] = schema
            nothing: list[float | None] = [None] * layer.num_experts
            rms[layer.name] = {role: list(nothing) for role in layer.roles}
            of_layout = _matrix_reader(artifact, layer)
            tasks += [(layer.name, schema.name, expert, of_layout) for expert in chosen[layer.name]]

        def count(task: tuple[str, str, int, MatrixReader]) -> dict[str, tuple[CodeCounts, float]]:
            _, schema_name, expert, read = task
            return _count_expert(read, schemas[schema_name], artifact.param_dtype, expert)

        # Over all layers: of a large artifact few experts of each are read.
        with ThreadPoolExecutor(num_threads, "hqconv-usage") as pool:
            for (name, schema_name, expert, _), of_expert in zip(tasks, pool.map(count, tasks), strict=True):
                for role, (one, size) in of_expert.items():
                    used.setdefault(schema_name, {}).setdefault(role, CodeCounts()).add(one)
                    rms[name][role][expert] = size
    return {
        "schemas": {
            name: {role: of_role.to_dict(schemas[name]) for role, of_role in sorted(roles.items())}
            for name, roles in used.items()
        },
        "rms": rms,
        "experts_read": len(tasks),
        "experts": sum(layer.num_experts for layer in layers),
        "layers_read": len(chosen),
        "layers": len(layers),
        "weights_read": sum(_num_weights(layer) * len(chosen.get(layer.name, ())) for layer in layers),
    }


def _choose(artifact: Artifact, layers: Sequence[MoeLayer], num_experts: int | None) -> dict[str, list[int]]:
    """Return the experts to read: layer → indices.

    Where one expert of each layer is more than WEIGHTS_READ weights, one expert is read of layers that are spread
    evenly over those of each schema: in each layer another one.
    """
    total = sum(_num_weights(layer) * layer.num_experts for layer in layers)
    share = 1.0 if num_experts is not None else min(1.0, WEIGHTS_READ / max(total, 1))
    if num_experts is not None or share * sum(layer.num_experts for layer in layers) >= len(layers):
        counts = (num_experts or max(1, int(layer.num_experts * share)) for layer in layers)
        of_layers = zip(layers, counts, strict=True)
        return {layer.name: _spread(layer.num_experts, min(count, layer.num_experts)) for layer, count in of_layers}
    of_schemas: dict[str, list[MoeLayer]] = {}
    for layer in layers:
        of_schemas.setdefault(artifact.schema_of(layer.name).name, []).append(layer)
    chosen: dict[str, list[int]] = {}
    for alike in of_schemas.values():
        count = max(1, int(share * sum(layer.num_experts for layer in alike)))
        for number, index in enumerate(_spread(len(alike), min(count, len(alike)))):
            chosen[alike[index].name] = [number * alike[index].num_experts // count]
    return chosen


def _num_weights(layer: MoeLayer) -> int:
    """Return the number of an expert's weights."""
    return len(layer.roles) * layer.hidden_size * layer.intermediate_size


def _spread(total: int, count: int) -> list[int]:
    """Return `count` of `total` experts at even steps, the first expert included."""
    return [index * total // count for index in range(count)]


def _matrix_reader(artifact: Artifact, layer: MoeLayer) -> MatrixReader:
    """Return a reader of one expert of a layer, for either layout."""
    if artifact.manifest.is_kernel:
        reader = ExpertReader(artifact, layer, refuse)
        return lambda expert: (one for gemm in names.GEMMS for one in reader.read(gemm, expert, refuse).items())
    shards = artifact.shards()

    def matrices(expert: int) -> Iterator[tuple[str, DecodedStack]]:
        for role in layer.roles:
            matrix = read_packed_expert(artifact, layer, role, expert, shards, refuse)
            assert matrix is not None  # `refuse` has raised
            yield role, matrix

    return matrices


def _count_expert(
    read: MatrixReader, schema: WeightSchema, param_dtype: str, expert: int
) -> dict[str, tuple[CodeCounts, float]]:
    """Return counts and root mean square of the decoded weights, by projection."""
    return {role: _count(matrix, schema, param_dtype) for role, matrix in read(expert)}


def _count(matrix: DecodedStack, schema: WeightSchema, param_dtype: str) -> tuple[CodeCounts, float]:
    used = CodeCounts(codes=np.bincount(matrix.codes.numpy().reshape(-1), minlength=256))
    if matrix.zero_point is not None and not schema.is_fp_zero_point:
        used.zero_points = np.bincount(matrix.zero_point.numpy().reshape(-1), minlength=256)
    scale = matrix.scale_value.numpy()
    is_good = np.isfinite(scale) & (scale != 0)
    powers, counts = np.unique(np.frexp(np.abs(scale[is_good]))[1] - 1, return_counts=True)
    used.scales.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
    used.num_zero = int(np.count_nonzero(scale == 0))
    used.num_negative = int(np.count_nonzero(scale < 0))
    used.num_odd = int(scale.size - np.count_nonzero(is_good)) - used.num_zero
    squares = [np.square(rows, dtype=np.float64).sum() for _, rows in decoded_rows(matrix, schema, param_dtype)]
    return used, math.sqrt(math.fsum(map(float, squares)) / matrix.codes.numel())
