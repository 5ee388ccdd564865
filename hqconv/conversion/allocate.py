"""Allocate schemas to the MoE layers of a source: measure every candidate in one pass, choose, and write a recipe.

A journal beside the recipe keeps the measurements of finished layers, so that a killed run goes on. Its identity is
that of the measurements: the budget may change between two runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hqconv import __version__
from hqconv.artifact.manifest import json_bytes
from hqconv.conversion.executor import Executor
from hqconv.conversion.hub_prefetch import CachePolicy, HubPrefetch, ShardUse, check_room, sort_by_shard
from hqconv.conversion.journal import Journal, JournalEntry, compare_identities
from hqconv.conversion.measure_candidates import CandidateMeasurements, MeasureCandidates
from hqconv.conversion.resources import Resources, bounded_gpu, plan_staging
from hqconv.conversion.source_integrity import is_of_these_files
from hqconv.conversion.stages import Meter, Progress, StageProfile
from hqconv.errors import OutputError, plural, printable_line
from hqconv.io.durable_files import FileRecord, is_whole, make_folder, output_errors, write_whole
from hqconv.io.output_file import FileKind, output_file
from hqconv.models.source_protocol import Source
from hqconv.planning.allocation import Allocation, Budget, Candidates, LayerOptions, allocate
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit
from hqconv.planning.plan import plan_conversion
from hqconv.quantization.cuda import check_kernels
from hqconv.schemas.options import RTN, SIZE, LayerChoice, Override, conversion_options
from hqconv.schemas.weight_schema import SOURCE

_LOG = logging.getLogger(__name__)
_RECIPE = FileKind("a recipe of hqconv allocate", lambda head: b"for each MoE layer, chosen by measured errors" in head)
_DOCUMENT = FileKind("a document of hqconv allocate", lambda head: b'"kind": "allocation"' in head)
_WRITTEN = "(output)"  # journal entry with the digests of the two output files; no layer has this name


@dataclass(frozen=True)
class AllocationReport:
    """The result of an allocation: the recipe's path, the choice, and the document that lies beside the recipe."""

    out: Path
    allocation: Allocation
    document: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Name the recipe and its totals; the rest is in `to_dict`."""
        point = self.allocation.point
        text = f"{point.size_bytes} bytes, {point.bits:.4f} bits per weight, error {point.relative_error:.4g}"
        return f"<AllocationReport {str(self.out)!r}: {plural(len(self.allocation.layers), 'layer')}, {text}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {**self.document, "out": str(self.out), "warnings": list(self.warnings)}


def run_allocation(
    source: Source,
    candidates: Candidates,
    budget: Budget,
    given: Mapping[str, Any],
    out: Path,
    resources: Resources,
    *,
    overwrite: bool = False,
    cache: CachePolicy | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> AllocationReport:
    """Measure the layers that the journal lacks, choose within the budget, and write the recipe; see `hqconv.allocate`.

    given: the options of a conversion that are not the default, for the recipe.
    Raises RequestError for a budget that no choice keeps, InputError for bad weights, OutputError for the files.
    """
    plans = candidates.layers
    allocate([LayerOptions.of(of_layer, None) for of_layer in plans.values()], replace(budget, max_layer_error=None))
    with _Output(source, out, _identity(source, candidates), overwrite=overwrite) as output:
        _measure(source, candidates, resources, cache or CachePolicy(), output, progress)
        layers = [LayerOptions.of(of_layer, output.measured[name]) for name, of_layer in plans.items()]
        found = allocate(layers, budget)
        warnings = _recipe_warnings(source, candidates, found)
        document = _document(budget, candidates, found, output.measured)
        source.guard.check_unchanged()
        output.write(recipe_text(found, budget, candidates, given, out).encode(), json_bytes(document))
    report = AllocationReport(out, found, document, warnings)
    _LOG.info("Done: %r.", report)
    return report


def _identity(source: Source, candidates: Candidates) -> dict[str, Any]:
    """Return everything that decides the measurements: versions, source, candidates and options."""
    prints = {one.name: json.dumps(one.plan.fingerprint(), sort_keys=True) for one in candidates.each}
    identity = {
        "hqconv version": __version__,
        "humming-kernels version": version("humming-kernels"),
        "source files": [asdict(file) for file in source.files],
        "commit of the source": source.revision,
        "source config": source.config,
        "source quantization": source.quantization,
        "--candidates": list(prints),
        "options of the candidates": {name: hashlib.sha256(one.encode()).hexdigest() for name, one in prints.items()},
    }
    document: dict[str, Any] = json.loads(json.dumps(identity))
    return document


class _Output:
    """The recipe and its document, with the journal beside them: one process at a time.

    measured: layer → measurements, of this run and of earlier ones. digests: of the source's files that were hashed.
    """

    def __init__(self, source: Source, out: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
        self._source = source
        self.root, self._out, self._identity, self._overwrite = out.parent, out, identity, overwrite
        self.measured: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, str] = {}

    def __enter__(self) -> _Output:
        with output_errors(self.root):
            make_folder(self.root)
        self._journal = Journal(self.root / journal_path(self._out).name)
        try:
            self._check_files()
            before = self._journal.identity
            if before is not None and self._overwrite and before != self._identity:
                self._journal.restart()
            elif before is not None:
                remedy = "Repeat the first command, or start anew with --overwrite."
                compare_identities(self._journal.path, before, self._identity, work="allocation", remedy=remedy)
            self._journal.begin(self._identity)
        except BaseException:
            self._journal.drop()
            raise
        for entry in self._journal.entries:
            if is_of_these_files(self._source, entry):
                self._take(entry)
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def _check_files(self) -> None:
        """Refuse existing files, unless they may be replaced or are those that an interrupted run wrote."""
        written = [entry for entry in self._journal.entries if entry.unit == _WRITTEN]
        records = {record.path: record for record in written[-1].files} if written else {}
        for path, kind in ((self._out, _RECIPE), (document_path(self._out), _DOCUMENT)):
            is_own = path.name in records and is_whole(self.root, records[path.name])
            if os.path.lexists(path) and not self._overwrite and not is_own:
                raise OutputError(
                    "The file exists already.",
                    where=str(path),
                    remedy="Choose another with -o, or replace it with --overwrite.",
                )
            output_file(path, "-o", kind)

    def record(self, entry: JournalEntry) -> None:
        """Record a finished layer; the record survives a kill from here on."""
        self._journal.record(entry)
        self._take(entry)

    def _take(self, entry: JournalEntry) -> None:
        if entry.unit != _WRITTEN:
            self.measured[entry.unit] = entry.measured
            self.digests |= entry.sources

    def write(self, recipe: bytes, document: bytes) -> None:
        """Write the document and then the recipe, and remove the journal."""
        data = {document_path(self._out).name: document, self._out.name: recipe}
        records = [FileRecord(name, len(one), hashlib.sha256(one).hexdigest()) for name, one in data.items()]
        self._journal.record(JournalEntry(_WRITTEN, records, {}))
        for name, one in data.items():
            write_whole(self.root, name, one)
        self._journal.remove()


def _measure(
    source: Source,
    candidates: Candidates,
    resources: Resources,
    cache: CachePolicy,
    output: _Output,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Measure all candidates of the layers that are not in the journal."""
    plans = [plan for of_layer in candidates.layers.values() for plan in of_layer.values()]
    staging = plan_staging(plans, resources, reads_ahead=source.reads_ahead)
    units: list[OutputUnit] = [
        replace(next(iter(of_layer.values())), files=()) for of_layer in candidates.layers.values()
    ]
    meter = Meter(sum(unit.num_bytes_read for unit in units), len(units), progress)
    for unit in units:
        if unit.name in output.measured:
            meter.resume(unit.name, unit.num_bytes_read)
    missing = [unit for unit in units if unit.name not in output.measured]
    if not missing:
        return
    if resources.is_cuda and any(plan.encoding.quantizer != RTN for plan in plans):
        check_kernels(resources.device)
    use = ShardUse.of(source, missing, keeps=cache.keeps)
    if source.listing is not None:
        missing = sort_by_shard(source, missing)
        check_room(source, use, cache, output.root)
    encodings = {
        name: {candidate: plan.encoding for candidate, plan in of_layer.items()}
        for name, of_layer in candidates.layers.items()
    }
    _LOG.info("%s: %s each.", plural(len(missing), "layer"), plural(len(candidates.each), "candidate"))
    with bounded_gpu(resources, "Then run the same command again: it keeps what is measured."):
        Executor(
            source,
            output.root,
            output.record,
            resources,
            staging,
            meter,
            StageProfile(),
            {},
            HubPrefetch(source, use, cache),
            dict(output.digests),
            encode=MeasureCandidates(encodings),
            measurements=CandidateMeasurements,
        ).run(missing)


def _recipe_warnings(source: Source, candidates: Candidates, found: Allocation) -> tuple[str, ...]:
    """Return the warnings of the conversion that the recipe stands for, whose sizes must be the promised ones."""
    base = candidates[base_of(found, candidates)]
    overrides = tuple(
        Override(layer, (), LayerChoice.of(schema), where=layer)
        for layer, option in found.of_layer.items()
        if option.candidate != base.name and (schema := candidates[option.candidate].schema) is not None
    )
    options = replace(candidates.options, schema=base.schema, overrides=overrides)
    plan = plan_conversion(options, source, base.plan.spec.target)
    sizes = {layer.name: sum(file.size_bytes for file in layer.files) for layer in plan.layers}
    assert sizes == {layer: option.size_bytes for layer, option in found.of_layer.items()}
    return (*plan.warnings, *plan.notices)


def _document(
    budget: Budget, candidates: Candidates, found: Allocation, measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the document beside the recipe: the choice, the curve, and the measurement of each candidate."""
    plan, chosen = candidates.each[0].plan, found.of_layer
    spec = plan.spec
    return {
        "kind": "allocation",
        "source": plan.source.origin,
        "budget": budget.to_dict() | {"limit_bytes": found.limit_bytes},
        "schema": base_of(found, candidates),
        "target": spec.target.name,
        "dtype": spec.param_dtype,
        "input_schema": spec.inputs.name,
        "tp": spec.grid.tp,
        "tp_split": spec.grid.split,
        "ep": spec.grid.ep,
        **spec.encoding.summary(),
        "candidates": [one.name for one in candidates.each],
        "left_out": dict(candidates.left_out),
        "chosen": found.point.to_dict(),
        "least_possible_error": found.bound,
        "is_optimal": found.is_optimal,
        "uniform": {name: point.to_dict() for name, point in found.uniform.items()},
        "curve": [point.to_dict() for point in found.curve],
        "layers": {
            options.name: {
                "chosen": chosen[options.name].candidate,
                "num_weights": options.num_weights,
                "candidates": _candidate_documents(options, candidates.layers[options.name], measured[options.name]),
            }
            for options in found.layers
        },
    }


def _candidate_documents(
    layer: LayerOptions, plans: Mapping[str, MoeLayerPlan], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the size and the errors of each candidate of one layer."""
    schemas = {name: plan.encoding.schema.name for name, plan in plans.items()}
    return {
        option.candidate: {
            "schema": schemas[option.candidate],
            "size_bytes": option.size_bytes,
            "token_bytes": option.token_bytes,
            "relative_error": option.relative_error,
            "projections": measured[option.candidate],
        }
        for option in layer.options
    }


# --- the recipe: an ordinary one for `convert --config`, with the figures as comments


def _text(value: Any) -> str:
    """Return an option's value as text: of a schema as an object its name."""
    return str(getattr(value, "name", value) if not isinstance(value, Path) else value)


def base_of(allocation: Allocation, candidates: Candidates) -> str:
    """Return the candidate that the recipe has for layers without an override.

    It is the source's own schema where a layer keeps it, because no override can name that; else the most common one.
    """
    counts = Counter(option.candidate for option in allocation.chosen)
    order = [one.name for one in candidates.each]
    return SOURCE if SOURCE in counts else max(counts, key=lambda name: (counts[name], -order.index(name)))


def recipe_text(
    allocation: Allocation, budget: Budget, candidates: Candidates, given: Mapping[str, Any], out: Path
) -> str:
    """Return the recipe, the same text for the same request and measurements.

    given: the options of the allocation that are not the default. out: the recipe's path.
    """
    base = base_of(allocation, candidates)
    lines = [f"# {printable_line(text)}" for text in _header(allocation, budget, candidates, out)]
    lines += [f"{key} = {_toml(value)}" for key, value in _keys(given, candidates, base, out).items()]
    for layer, option in zip(allocation.layers, allocation.chosen, strict=True):
        bits = float(Fraction(8 * option.size_bytes, layer.num_weights))
        figures = f"{option.candidate}, error {option.relative_error:.4g}, {bits:.4f} bits per weight"
        lines += ["", f"# {printable_line(layer.name)}: {figures}"]
        if option.candidate != base:
            lines += ["[[override]]", f"blocks = {_toml(_escaped(layer.name))}"]
            lines.append(f"schema = {_toml(_schema_value(option.candidate, out))}")
    return "\n".join(lines) + "\n"


def _header(allocation: Allocation, budget: Budget, candidates: Candidates, out: Path) -> Iterator[str]:
    source, point = candidates.each[0].plan.source, allocation.point
    name = (source.repo_id or source.name) + (f" at {source.revision}" if source.revision else "")
    yield f"{name}: a schema for each MoE layer, chosen by measured errors. Use it with convert --config."
    of = "the files of experts of all ranks" if budget.objective == SIZE else "the experts that one token reads"
    yield f"Budget: {allocation.limit_bytes} bytes of {of}."
    chosen = f"{point.size_bytes} bytes, {point.bits:.4f} bits per weight, error {point.relative_error:.4g}"
    yield f"Chosen: {chosen}, {point.token_bytes} bytes for a token."
    if allocation.is_optimal:
        yield "No choice within the budget has a smaller error."
    else:
        yield f"No choice within the budget has an error below {allocation.bound:.4g}."
    yield "Errors: root of the mean squared relative error of all layers."
    yield f"All figures are in {document_path(out).name}, for hqconv report --allocation."


def document_path(out: Path) -> Path:
    """Return the path of the document beside a recipe."""
    return out.with_name(f"{out.name.removesuffix('.toml')}.allocation.json")


def journal_path(out: Path) -> Path:
    """Return the path of the journal beside an unfinished recipe."""
    return out.with_name(f"{out.name}.partial.jsonl")


def _keys(given: Mapping[str, Any], candidates: Candidates, base: str, out: Path) -> dict[str, Any]:
    """Return the recipe's options: the resolved target and dtype, and options other than the default."""
    options, target = candidates.options, candidates.each[0].plan.spec.target
    keys: dict[str, Any] = {"schema": _schema_value(base, out), "target": target.name}
    for name, option in conversion_options().items():
        value = given.get(name, option.default)
        if not option.in_recipes or name in keys or value is None or value == option.default:
            continue
        if option.is_path or (option.is_schema and _text(value).endswith(".toml")):
            keys[name] = _beside(_text(value), out)
        else:
            keys[name] = _text(value) if option.plain_type is str else value
    return {**keys, "dtype": options.dtype}


def _schema_value(candidate: str, out: Path) -> str:
    return _beside(candidate, out) if candidate.endswith(".toml") else candidate


def _beside(path: str, out: Path) -> str:
    """Return a file's path as the recipe has it: relative to the recipe's folder; a packaged file by its name."""
    return os.path.relpath(path, out.parent) if os.path.lexists(path) else path


def _escaped(name: str) -> str:
    """Return a pattern that matches one name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _toml(value: Any) -> str:
    """Return a value of a TOML file: a text, a whole number or a truth value."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
