"""Convert a source to an artifact: validate, plan the staging, run the output units, finish and seal the folder.

`--update` recognizes a finished artifact that the same request would make of the same source again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.build import (
    Origin,
    completed_manifest,
    hub_digest,
    planned_manifest,
    with_file,
    with_fingerprints,
)
from hqconv.artifact.error_summary import reached_warnings, requantized, scale_changes
from hqconv.artifact.expected import ExpectedArtifact
from hqconv.artifact.manifest import Manifest, json_bytes, sealed
from hqconv.artifact.model_card import card_bytes, sums_bytes
from hqconv.calibration.inputs import ExpertInputs, expert_inputs
from hqconv.calibration.streamed_model import Stream
from hqconv.conversion.collect_input_scales import InputScales, read_input_scales
from hqconv.conversion.encode_batch import encode_to_runs, is_calibrated, num_batches
from hqconv.conversion.executor import Executor
from hqconv.conversion.hub_prefetch import CachePolicy, HubPrefetch, sort_by_shard
from hqconv.conversion.journal import JournalEntry
from hqconv.conversion.output_folder import OutputFolder, Part, check_finished
from hqconv.conversion.resources import Resources, Staging, bounded_gpu, plan_staging, time_text
from hqconv.conversion.stages import Meter, Progress, StageProfile
from hqconv.errors import RequestError, plural
from hqconv.io.durable_files import FileRecord, check_space, copy_whole, size_of, write_whole
from hqconv.io.file_access import sha256_of
from hqconv.kernel_layout.transform import is_compatible
from hqconv.models.source_protocol import Source
from hqconv.models.tensor_names import decoder_layer
from hqconv.planning.notices import draft_layers
from hqconv.planning.output_units import CopiedShardPlan, MoeLayerPlan, OutputUnit, layers_of
from hqconv.planning.plan import ConversionPlan
from hqconv.quantization.quantize import check_kernels
from hqconv.schemas.artifact_names import CARD, CONFIG, INDEX, MANIFEST, SUMS
from hqconv.schemas.engine import ENGINE
from hqconv.schemas.options import RTN
from hqconv.sources.opening import frozen_objects, without_gc
from hqconv.version import __version__

_LOG = logging.getLogger(__name__)
_LONG_S = 120  # of a conversion whose time is told before


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion.

    errors: MoE layer → projection → quantization error. num_units_resumed: output units that were complete before this
    run; all of them where `was_finished` (the artifact existed already). seconds: duration of this run.
    manifest_sha256: digest of hqconv.json; "" where this process did a part, and the artifact is not finished yet:
    `missing` are the units that no ended part has done, `parts_at_work` the other parts that are not at their end.
    evaluation: the document of the evaluation that ended the conversion; None without one. over_max_kl: its mean
    divergence is above the limit that was given.
    profile: `StageProfile.to_dict`.
    """

    out: Path
    plan: ConversionPlan
    num_blocks: int
    num_ranks: int
    num_bytes_in: int
    num_bytes_out: int
    num_units_resumed: int
    errors: dict[str, dict[str, Any]]
    seconds: float
    num_workers: int
    manifest_sha256: str
    was_finished: bool = False
    replaced_because: str = ""
    part: str = ""
    missing: tuple[str, ...] = ()
    parts_at_work: tuple[str, ...] = ()
    evaluation: dict[str, Any] | None = None
    over_max_kl: bool = False
    warnings: tuple[str, ...] = field(default=())
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if the artifact is finished."""
        return self.manifest_sha256 != ""

    def __repr__(self) -> str:
        """Name the artifact and its size; the rest is in `to_dict`."""
        text = f"{self.plan.spec.schema.name}, {plural(self.num_blocks, 'layer')}, {plural(self.num_ranks, 'rank')}"
        return f"<ConversionReport {str(self.out)!r}: {text}, {self.num_bytes_out} bytes in {self.seconds:.1f} s>"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        if not self.is_complete:
            return self._part_to_dict()
        spec = self.plan.spec
        left_out = (
            "plan",
            "out",
            "warnings",
            "profile",
            "part",
            "missing",
            "parts_at_work",
            "over_max_kl",
        )
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return {
            "kind": "summary",
            "source": self.plan.source.origin,
            **fields,
            "out": str(self.out),
            "schema": spec.schema.name,
            "otherwise": spec.otherwise(),
            "left_blocks": list(self.plan.experts.left),
            "dense": self.plan.dense,
            "layout": spec.layout,
            "target": spec.target.name,
            "dtype": spec.param_dtype,
            **spec.encoding.summary(),
            "tp": spec.grid.tp,
            "tp_split": spec.grid.split,
            "ep": spec.grid.ep,
            "warnings": list(self.warnings),
            "conversion": dict(Counter(layer.encoding.conversion for layer in self.plan.layers)),
            "requantized": requantized(self.errors),
            "largest_scale_change": scale_changes(self.errors),
            "serve_command": ENGINE.serve_command(
                str(self.out), spec.layout, spec.grid, self.plan.source.heads
            ),
        }

    def _part_to_dict(self) -> dict[str, Any]:
        return {
            "kind": "part",
            "source": self.plan.source.origin,
            "out": str(self.out),
            "part": self.part,
            "num_units": len(self.plan.units),
            "missing": list(self.missing),
            "parts_at_work": list(self.parts_at_work),
            "errors": self.errors,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
        }


def convert(
    source: Source,
    plan: ConversionPlan,
    out: Path,
    resources: Resources,
    *,
    resume: bool = False,
    overwrite: bool = False,
    update: bool = False,
    part: Part | None = None,
    progress: Callable[[Progress], None] | None = None,
    digests: bool = False,
    cache: CachePolicy | None = None,
    held_out: Sequence[torch.Tensor] = (),
    finish: Callable[[ConversionReport, Stream | None], ConversionReport] = lambda report, _: (
        report
    ),
) -> ConversionReport:
    """Write the planned artifact to `out`; see `hqconv.convert`.

    part: this process's part of the work. cache: limits for the Hub's cache. held_out: token ids [B, T] that go
    through the source's layers beside those of a calibration. finish: is called with the report of a complete artifact,
    and with the passes over `held_out`, which have gone through some or all layers; None where no calibration ran them.
    Raises InputError for bad weights, OutputError for the folder or the disk, RequestError if `resources` cannot hold
    one expert, or if Triton cannot build kernels on the GPU.
    """
    started_s = time.monotonic()
    if digests or (update and source.repo_id is None):  # the next update compares them
        source.guard.is_hashing = True
    check_kernels_exist(plan)
    input_scales = read_input_scales(source, plan)
    staging = plan_staging(
        plan.encoded, resources, reads_ahead=source.reads_ahead, has_model_limit=True
    )
    if resources.is_cuda and any(layer.encoding.quantizer != RTN for layer in plan.encoded):
        check_kernels(resources.device)

    if resources.estimate_s(plan.layers) > _LONG_S or plan.spec.encoding.calibration is not None:
        _LOG.warning("The conversion takes %s.", time_text(plan.layers, resources))
    units = plan.units if part is None else part.share(plan.units)
    layers = _calibrated_layers(plan.units)
    sizes = {unit.name: unit.num_bytes_read for unit in units}
    of_layers = {name: sizes[name] for name in {layer.name for layer in plan.layers} & sizes.keys()}
    meter = Meter(sum(sizes.values()), len(units), progress, of_layers)
    with calibrated_inputs(source, plan, layers, resources, staging, held_out) as inputs:
        if inputs is not None:
            inputs.announce = meter.announce
        conversion = _Conversion(
            source=source,
            plan=plan,
            expected=expected_of(source, plan),
            out=out,
            resources=resources,
            staging=staging,
            input_scales=input_scales,
            inputs=inputs,
            cache=cache or CachePolicy(),
            units=units,
            meter=meter,
            profile=StageProfile(),
            part=part,
            started_s=started_s,
        )
        if part is None:
            report = conversion.run(resume=resume, overwrite=overwrite, update=update)
        else:
            report = conversion.run_part()
        _LOG.info(
            "%s %r.",
            "The artifact was finished before:" if report.was_finished else "Done:",
            report,
        )
        if not report.is_complete:
            return report
        if held_out:
            meter.announce("evaluating")
        return finish(report, None if inputs is None else inputs.reference())


@dataclass(frozen=True)
class _Conversion:
    """One process's conversion: its inputs, its limits, and the output units that it writes."""

    source: Source
    plan: ConversionPlan
    expected: ExpectedArtifact
    out: Path
    resources: Resources
    staging: Staging
    input_scales: Mapping[str, InputScales]
    inputs: ExpertInputs | None
    cache: CachePolicy
    units: Sequence[OutputUnit]
    meter: Meter
    profile: StageProfile
    part: Part | None
    started_s: float

    def run(self, *, resume: bool, overwrite: bool, update: bool) -> ConversionReport:
        """Take the output folder, convert, and seal."""
        source = self.source
        plan = self.plan
        num_bytes_out = plan.num_bytes_out + plan.other_bytes
        with self._folder() as folder:
            is_new = folder.start(
                num_bytes_out,
                resume=resume,
                overwrite=overwrite,
                why_not_current=partial(why_not_current, source, plan, self.out)
                if update
                else None,
            )
            if not is_new:
                return self._finished(folder)
            num_resumed = len(folder.done)
            if not folder.has_lock:
                folder.warnings.append(
                    "This file system has no locks: nothing keeps another process away."
                )
            self._run_missing(folder)
            return self._finish(folder, num_resumed)

    def run_part(self) -> ConversionReport:
        """Convert a part's units beside other parts; seal the artifact as the last one."""
        plan = self.plan
        assert self.part is not None
        with self._folder() as folder:
            if not folder.join(self.part, self.units):
                return self._finished(folder)
            num_resumed = len(folder.done)
            self._run_missing(folder)
            at_work = folder.leave()
            if at_work is None:
                return self._finished(folder)
            missing = tuple(unit.name for unit in plan.units if unit.name not in folder.done)
            if not missing and not at_work:
                return self._finish(folder, num_resumed)
            errors = measured_errors(self.units, folder.done)
            return self._report(
                folder,
                errors,
                "",
                num_units_resumed=num_resumed,
                missing=missing,
                parts_at_work=at_work,
            )

    def _folder(self) -> OutputFolder:
        identity = {"hqconv version": __version__, **self.expected.identity()}
        guard = self.source.guard
        return OutputFolder(
            self.out,
            identity,
            self.plan.paths,
            self.expected.difference,
            lambda entry: entry.states == guard.states(entry.states),
        )

    def _finished(self, folder: OutputFolder) -> ConversionReport:
        """Return the report where the artifact was finished before; raises OutputError as `check_finished`."""
        manifest = check_finished(self.out, self.expected.difference)
        return self._report(
            folder,
            manifest.errors(),
            manifest.sha256,
            num_units_resumed=len(self.plan.units),
            was_finished=True,
        )

    def _run_missing(self, folder: OutputFolder) -> None:
        """Check the space for the units that are not done, and convert them."""
        missing = self._missing(folder.done)
        for unit in self.units:
            if unit.name in folder.done:
                self.meter.resume(unit.name, unit.num_bytes_read)
        num_bytes = (
            sum(file.size_bytes for unit in missing for file in unit.files) + self.plan.other_bytes
        )
        check_space(folder.root, num_bytes)
        lanes = f"{plural(self.staging.num_lanes, 'worker')} with at most {plural(self.staging.num_experts, 'expert')}"
        num_done = len(folder.done)
        _LOG.info(
            "Conversion of %s begins, %d done before; %s.",
            plural(len(missing), "unit"),
            num_done,
            lanes,
        )
        encode = encode_to_runs
        if self.inputs is not None:
            encode = partial(encode_to_runs, inputs_of=self.inputs.of)
            for layer in _calibrated_layers(missing):
                self.inputs.expect(layer.layer, num_batches(layer, self.staging.num_experts))
        with bounded_gpu(self.resources, "Then go on with --resume."):
            executor = Executor(
                self.source,
                folder.root,
                folder.record,
                self.resources,
                self.staging,
                self.meter,
                self.profile,
                self.input_scales,
                HubPrefetch(self.source, missing, self.cache),
                encode=encode,
            )
            with frozen_objects():
                executor.run(missing)

    def _missing(self, done: Collection[str]) -> list[OutputUnit]:
        """Return the units that are not done, in the order of the work."""
        missing = [unit for unit in self.units if unit.name not in done]
        # the model runs once, from its first layer to the last
        if self.plan.spec.encoding.calibration is not None:
            return missing
        return (
            take_in_turn(missing)
            if self.source.listing is None
            else sort_by_shard(self.source, missing)
        )

    @without_gc()
    def _finish(self, folder: OutputFolder, num_resumed: int) -> ConversionReport:
        """Write the sidecar files, the manifest with its model card and digests, and seal the folder."""
        source = self.source
        plan = self.plan
        _LOG.info("Sidecar files, manifest and model card are written.")
        sidecar_files = write_sidecar_files(source, plan, self.expected, folder.root)
        generated, remark = source.sidecar_files.generate()
        sidecar_files += [write_whole(folder.root, name, data) for name, data in generated.items()]
        if remark:
            folder.warnings.append(remark)
            plan = replace(plan, warnings=(*plan.warnings, remark))
        errors = measured_errors(plan.units, folder.done)
        folder.warnings.extend(reached_warnings(errors))
        records = [record for unit in plan.units for record in folder.done[unit.name].files]
        source.guard.check_unchanged()
        digests = {} if source.repo_id is not None else source.guard.digests  # the Hub has its own
        origin = Origin.of(source)
        source_files = [
            replace(file, sha256=digests.get(file.name), hub_sha256=hub_digest(source, file.name))
            for file in origin.source.files
        ]
        planned = planned_manifest(origin, plan.experts, plan.spec, plan.units)
        manifest = completed_manifest(
            with_fingerprints(planned, plan.spec),
            errors,
            self.input_scales,
            [*records, *sidecar_files],
            source_files,
            plan.warnings,
        )
        card = card_bytes(manifest, source.sidecar_files.card)
        manifest = with_file(manifest, write_whole(folder.root, CARD, card))
        data = sealed(manifest.to_dict())
        sums = sums_bytes(manifest.files, hashlib.sha256(data).hexdigest())
        write_whole(folder.root, SUMS, sums)
        source.guard.check_unchanged()
        folder.seal(data)
        return self._report(
            folder, errors, hashlib.sha256(data).hexdigest(), num_units_resumed=num_resumed
        )

    def _report(
        self,
        folder: OutputFolder,
        errors: dict[str, dict[str, Any]],
        manifest_sha256: str,
        **more: Any,
    ) -> ConversionReport:
        """Return the report. more: fields of it, where they are not the default."""
        return ConversionReport(
            out=self.out,
            plan=self.plan,
            num_blocks=len(self.plan.layers),
            num_ranks=self.plan.num_ranks,
            num_bytes_in=self.plan.source.num_bytes,
            num_bytes_out=self.plan.num_bytes_out,
            errors=errors,
            seconds=time.monotonic() - self.started_s,
            num_workers=self.staging.num_lanes,
            manifest_sha256=manifest_sha256,
            replaced_because=folder.replaced_because if self.part is None else "",
            part="" if self.part is None else str(self.part),
            warnings=(*self.plan.warnings, *self.plan.notices, *folder.warnings),
            profile={**self.profile.to_dict(), "staging": self.staging.to_dict()},
            **more,
        )


@contextmanager
def calibrated_inputs(
    source: Source,
    plan: ConversionPlan,
    layers: Sequence[MoeLayerPlan],
    resources: Resources,
    staging: Staging,
    held_out: Sequence[torch.Tensor] = (),
) -> Iterator[ExpertInputs | None]:
    """Yield the inputs of some layers' experts over the calibration's text; None where there is nothing to calibrate.

    staging: of the work on them. held_out: as of `expert_inputs`. Raises as `expert_inputs`, and
    RequestError where the text changed since the plan, or the activation of the experts is not known.
    """
    calibration = plan.spec.encoding.calibration
    if calibration is None or calibration.path is None or not layers:
        yield None
        return
    unknown = next((one.layer for one in layers if not one.layer.knows_activation), None)
    if unknown is not None:
        raise RequestError(
            "The experts' activation is known by its name only, so the inputs of w2 cannot be computed.",
            where=f"layer {unknown.name}",
            found=unknown.activation.describe(),
            remedy="Convert without --calibrate.",
        )
    source.fetch(plan.other_files)  # the tokenizer's among them
    with expert_inputs(
        source,
        calibration.path,
        calibration.num_tokens,
        calibration.context_length,
        resources.device,
        resources.model_limit(),
        (min(len(layers), staging.num_lanes + 1), min(len(layers), resources.max_lanes + 1)),
        0 if resources.is_cuda else staging.lane_bytes,
        held_out,
        resources.num_threads,
    ) as inputs:
        calibration.check_unchanged()
        rounded = tuple(map(decoder_layer, draft_layers(plan.experts, source.config)))
        lost = [
            layer.name
            for layer in layers
            if decoder_layer(layer.name) not in rounded and not inputs.runs(layer.layer)
        ]
        if lost:
            raise RequestError(
                "The transformers library does not run a layer of this model.",
                where=f"layer {lost[0]}",
                remedy="Convert without --calibrate.",
            )
        yield inputs


def _calibrated_layers(units: Sequence[OutputUnit]) -> list[MoeLayerPlan]:
    return [layer for unit in units for layer in layers_of(unit) if is_calibrated(layer)]


def measured_errors(
    units: Iterable[OutputUnit], done: Mapping[str, JournalEntry]
) -> dict[str, dict[str, Any]]:
    """Return the quantization error of each MoE layer, and linear group, of finished units."""
    errors: dict[str, dict[str, Any]] = {}
    for unit in units:
        measured = done[unit.name].measured
        errors |= {unit.name: measured} if isinstance(unit, MoeLayerPlan) else measured
    return errors


def take_in_turn(units: Sequence[OutputUnit]) -> list[OutputUnit]:
    """Order units so that copied shards alternate with MoE layers, from the start on.

    A GPU's kernels are loaded with the first batch: meanwhile bytes are copied. The digest of a large shard takes a
    thread for seconds: it is computed beside the layers that follow.
    """
    copied = [unit for unit in units if isinstance(unit, CopiedShardPlan)]
    layers = [unit for unit in units if not isinstance(unit, CopiedShardPlan)]
    pairs = itertools.zip_longest(layers, copied)
    return [unit for pair in pairs for unit in pair if unit is not None]


def check_kernels_exist(plan: ConversionPlan) -> None:
    """Ask Humming whether it has kernels for the plan's combinations.

    Raises RequestError where it has none: another version of Humming is installed than hqconv was written for.
    """
    spec = plan.spec
    if all(is_compatible(kernel_spec) for kernel_spec in spec.kernel_specs):
        return
    request = (
        f"{spec.schema.describe()}; {spec.inputs.describe()}; {spec.param_dtype}, {spec.target}"
    )
    raise RequestError(
        "Humming has no kernel for this combination.",
        where=f"schema {spec.schema.name} ({request})",
        found=f"humming-kernels {version('humming-kernels')}",
        remedy="Install hqconv again, with the version of humming-kernels that it names.",
    )


def write_sidecar_files(
    source: Source, plan: ConversionPlan, expected: ExpectedArtifact, root: Path
) -> list[FileRecord]:
    """Copy the tokenizer and other small files, and write config.json and the index of the ordinary shards.

    Files of the Hub are fetched first. Raises InputError where a file of the source cannot be read or differs from its
    manifest, OutputError, or NetworkError.
    """
    source.fetch(plan.other_files)
    written = [copy_whole(source.root / name, root, name) for name in plan.other_files]
    for record in written:
        source.guard.compare(record.path, record.sha256)
    documents = {CONFIG: expected.config}
    if expected.index is not None:
        documents[INDEX] = expected.index
    for name, document in documents.items():
        written.append(write_whole(root, name, json_bytes(document)))
    return written


def expected_of(source: Source, plan: ConversionPlan) -> ExpectedArtifact:
    """Return the documents and files of the artifact that a plan gives."""
    return ExpectedArtifact.of(Origin.of(source), plan.experts, plan.spec, plan.units)


def why_not_current(
    source: Source, plan: ConversionPlan, out: Path | None, manifest: Manifest
) -> str:
    """Return why the artifact at `out` is to be made anew; "" if this request and source would give it again.

    out: None for a complete artifact elsewhere, of which only the manifest is here.
    """
    expected = expected_of(source, plan)
    difference = expected.difference(manifest)
    if difference is not None:
        return f"{difference.key} differs: {difference.found} is now {difference.expected}"
    planned = {*plan.paths} - {SUMS, MANIFEST, *plan.made_files}
    if planned != manifest.files.keys() - set(plan.made_files):
        return "the source has other files beside its weights"
    if out is not None:
        missing = manifest.missing_files(lambda name: size_of(out / name))
        if missing:
            return f"{missing[0]} is missing or has another size"
    if manifest.alteration is not None:
        return "the manifest was altered"
    if hashlib.sha256(json_bytes(expected.config)).hexdigest() != manifest.files[CONFIG].sha256:
        return f"{CONFIG} of the source has other bytes"
    return _why_not_same_bytes(source, plan, manifest)


def _why_not_same_bytes(source: Source, plan: ConversionPlan, manifest: Manifest) -> str:
    """Return why the source's bytes are not known to be those of the conversion; names and headers are the same."""
    if source.repo_id is not None:  # the commit is the same
        return ""
    digests = {name: manifest.files[name].sha256 for name in plan.other_files}
    for file in manifest.source.files:
        if file.sha256 is None:
            return (
                "the artifact has no digests of the source's files, which --source-digests records"
            )
        digests[file.name] = file.sha256
    for name, sha256 in digests.items():
        if sha256_of(source.root / name) != sha256:
            return f"{name} of the source has other bytes"
    return ""
