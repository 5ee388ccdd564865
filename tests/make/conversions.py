"""Conversions as programs do them, with what tests leave out filled in: on the CPU, for sm90."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hqconv
from hqconv.artifact.manifest import sealed
from hqconv.conversion.convert import ConversionReport
from hqconv.conversion.output_folder import UnitWriter
from hqconv.conversion.stages import Progress
from hqconv.io.durable_files import FileRecord
from hqconv.models.source_protocol import Source
from hqconv.planning.output_units import OutFile
from hqconv.planning.plan import ConversionPlan, make_plan
from hqconv.planning.spec import ConversionOptions, make_spec
from hqconv.schemas.gpu_target import GpuTarget
from hqconv.schemas.grid import Grid
from hqconv.schemas.input_schema import KernelSpec, resolve_inputs
from hqconv.schemas.options import CheckName
from hqconv.schemas.weight_schema import (
    LayerSchema,
    WeightSchema,
    resolve_layer_schema,
    resolve_schema,
)
from hqconv.sources.opening import open_source
from hqconv.verification.result import VerificationReport


@functools.cache
def schema_of(name: str) -> WeightSchema:
    return resolve_schema(name)


def open_plan(
    src: Path, schema: str | LayerSchema, grid: Grid | None = None, layout: str = "kernel"
) -> tuple[Source, ConversionPlan]:
    """Open a folder and plan its conversion; the source is the caller's to close."""
    source = open_source(src)
    experts = source.map_experts()
    chosen = (
        resolve_layer_schema(schema) if isinstance(schema, str) and schema != "source" else schema
    )
    options = ConversionOptions(
        None if isinstance(chosen, str) else chosen, None, grid or Grid(), layout=layout
    )
    request = make_spec(options, experts, source.config, GpuTarget(90))
    return source, make_plan(source, experts, request)


def run(
    src: Path,
    out: Path,
    schema: str | LayerSchema,
    grid: Grid | None = None,
    *,
    threads: int = 2,
    max_memory: int = 1 << 30,
    **options: Any,
) -> ConversionReport:
    """`hqconv.convert`."""
    grid = grid or Grid()
    ranks: dict[str, Any] = {
        "tp": grid.tp,
        "tp_split": grid.split,
        "ep": grid.ep,
        "expert_placement": grid.placement,
        "redundant_experts": grid.redundant,
    }
    ranks["allow_unserved"] = True  # what a kernel makes of it is not every test's business
    bounds = {"threads": threads, "max_memory": max_memory, "device": "cpu"}
    words: dict[str, Any] = {"target": "sm90", **ranks, **bounds, **options}
    return hqconv.convert(src, out, schema=schema, **words)


def run_until(
    src: Path,
    out: Path,
    num_units: int,
    schema: str | LayerSchema,
    grid: Grid | None = None,
    **options: Any,
) -> None:
    """`run`, interrupted once so many units are done."""

    def stop(progress: Progress) -> None:
        if progress.num_units_done == num_units:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run(src, out, schema, grid, progress=stop, **options)
        raise AssertionError(f"it ended before {num_units} units were done")


def check(
    out: Path, source: Path | None = None, *checks: CheckName, **options: Any
) -> VerificationReport:
    """`hqconv.verify` of some checks; all that can run where none is named."""
    return hqconv.verify(out, source, checks=checks or None, **{"threads": 2, **options})


def manifest(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "hqconv.json").read_bytes()))


def write_manifest(out: Path, words: Mapping[str, Any]) -> None:
    """Write an edited manifest, with the digest that belongs to it."""
    (out / "hqconv.json").write_bytes(sealed(words))


def assert_verified(out: Path, source: Path | None = None) -> None:
    """The artifact's files and weights are good: alone, and against its source where one is given."""
    for against in (source, None) if source is not None else (None,):
        report = check(out, against, "files", "weights")
        assert report.passed, [f for result in report.results for f in result.findings]


def finished(writer: UnitWriter, files: Sequence[OutFile]) -> list[FileRecord]:
    """Flush and publish a group's files, one after the other."""
    records = [writer.finish_file(file) for file in files]
    writer.publish()
    return records


def kernel_spec_of(
    schema: WeightSchema | str,
    param_dtype: str = "bfloat16",
    sm_version: int = 90,
    inputs: str = "a16",
    cuda: tuple[int, int] | None = None,
) -> KernelSpec:
    """What decides a kernel layout, in short words."""
    weights = resolve_schema(schema) if isinstance(schema, str) else schema
    return KernelSpec(weights, param_dtype, GpuTarget(sm_version, cuda), resolve_inputs(inputs))


def evaluation_of(manifest_sha256: str) -> dict[str, Any]:
    """A document of `hqconv evaluate`, for the artifact with this manifest."""
    both = {"source": 2.0, "artifact": 7.4}
    kl = dict.fromkeys(("mean", "standard_error", "median", "p90", "p99", "max"), 0.125)
    return {
        "kind": "evaluation",
        "manifest_sha256": manifest_sha256,
        "artifact": "out",
        "schema": "int8",
        "source": {"name": "src", "revision": None},
        "text": {"name": "text", "sha256": "0" * 64},
        "num_tokens": 9,
        "num_predictions": 8,
        "context_length": 9,
        "compute_dtype": "float32",
        "transformers_version": "5",
        "kl": kl,
        "perplexity": both,
        "mean_nll": both,
        "top1_agreement": 0.5,
        "warnings": [],
    }
