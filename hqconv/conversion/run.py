"""What a plan says of the layouts, held to Humming before anything is written."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hqconv import __version__
from hqconv.artifact.build import Measured, build_manifest, first_difference, with_file
from hqconv.artifact.error_summary import requantized, scale_changes
from hqconv.artifact.manifest import read_manifest
from hqconv.artifact.manifest_digest import json_bytes, sealed
from hqconv.artifact.sha256sums import sums_bytes
from hqconv.conversion.disk_space import check_room
from hqconv.conversion.distributed import ProcessGroup, ProcessShare
from hqconv.conversion.executor import Executor
from hqconv.conversion.hub_prefetch import CachePolicy, HubPrefetch, in_stretches
from hqconv.conversion.input_scales import InputScales, read_input_scales
from hqconv.conversion.journal import Destination
from hqconv.conversion.output_folder import OutputFolder
from hqconv.conversion.profile import StageProfile
from hqconv.conversion.progress import Meter, Progress
from hqconv.conversion.resources import Resources, Staging, bounded_gpu, plan_staging
from hqconv.conversion.sidecar_files import write_beside, write_card
from hqconv.conversion.source_integrity import source_digests
from hqconv.errors import OutputError, RequestError
from hqconv.humming_layout.gemm_forms import planned_packed_form
from hqconv.humming_layout.transform import is_as_planned, is_compatible, packed_form
from hqconv.io.digests import sha256_of
from hqconv.io.durable_files import check_space, write_whole
from hqconv.models.protocols import Source
from hqconv.planning.output_units import MoeLayerPlan, OutputUnit, gemm_shapes
from hqconv.planning.plan import ConversionPlan
from hqconv.planning.spec import ConversionSpec
from hqconv.schemas import artifact_names
from hqconv.serving.engine import ENGINE


def check_forms(plan: ConversionPlan) -> None:
    """Ask Humming whether it runs the schema, and lays out every block as planned.

    Raises RequestError where it does not: it is another Humming than the one that hqconv was made for.
    """
    spec = plan.spec
    if all(is_compatible(kind) for kind in spec.kinds):
        wrong = next((block for block in plan.blocks if not _is_as_planned(block, spec)), None)
        if wrong is None:
            return
        what, block = "Humming lays out its tensors in another way than this version of hqconv.", wrong.name
    else:
        what, block = "Humming has no kernel for this combination.", "all blocks"
    words = f"{spec.schema.describe()}; {spec.inputs.describe()}; {spec.param_dtype}, {spec.target}"
    raise RequestError(
        what,
        where=f"{block}, schema {spec.schema.name} ({words})",
        found=f"humming-kernels {version('humming-kernels')}",
        remedy="Install hqconv again, with the version of humming-kernels that it names.",
    )


def _is_as_planned(planned: MoeLayerPlan, spec: ConversionSpec) -> bool:
    block = planned.block
    if spec.layout == artifact_names.KERNEL:
        kind = spec.kernel_spec_of(block.name)
        shapes = gemm_shapes(block, spec.grid.tp, kind.schema)
        return all(
            is_as_planned(planned.forms[gemm], n, k, kind, block.has_bias) for gemm, (n, k) in shapes.items()
        )
    words = (spec.schema, spec.param_dtype, block.has_bias)
    facts = [(*block.shape(role), *words) for role in block.roles]
    return all(packed_form(*one) == planned_packed_form(*one) for one in facts)


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    errors: block → projection → quantization error. num_groups_resumed: groups of files that were complete before, all
    of them where `was_finished`: the artifact was there already. seconds: of this run. manifest_sha256: of hqconv.json.
    profile: what each stage of it did, as `StageProfile.words`.
    """

    out: Path
    plan: ConversionPlan
    num_blocks: int
    num_ranks: int
    num_bytes_in: int
    num_bytes_out: int
    num_groups_resumed: int
    errors: dict[str, dict[str, Any]]
    seconds: float
    num_workers: int
    manifest_sha256: str
    was_finished: bool = False
    warnings: tuple[str, ...] = field(default=())
    profile: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON words."""
        spec = self.plan.spec
        kept = {
            key: value
            for key, value in vars(self).items()
            if key not in ("plan", "out", "warnings", "profile")
        }
        return {
            "kind": "summary",
            "source": self.plan.source.origin,
            **kept,
            "out": str(self.out),
            "schema": spec.schema.name,
            "layout": spec.layout,
            "target": spec.target.name,
            "dtype": spec.param_dtype,
            **spec.encoding.summary(),
            "tp": spec.grid.tp,
            "ep": spec.grid.ep,
            "warnings": list(self.warnings),
            "conversion": dict(Counter(block.encoding.conversion for block in self.plan.blocks)),
            "requantized": requantized(self.errors),
            "largest_scale_change": scale_changes(self.errors),
            "serve_command": ENGINE.serve_command(str(self.out), spec.layout, spec.grid),
        }

    def words(self) -> dict[str, Any]:
        """`to_dict`, by its name of version 0.1."""
        return self.to_dict()


def convert(
    source: Source,
    plan: ConversionPlan,
    out: Path,
    resources: Resources,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    in_team: bool = False,
    digests: bool = False,
    cache: CachePolicy | None = None,
) -> ConversionReport:
    """Write the planned artifact to `out`, or with `in_team` this process's share of it; see `hqconv.convert`.

    cache: what may be taken of the Hub's cache.
    Raises InputError for bad weights, OutputError for the folder or the disk, RequestError if `resources` cannot hold
    one expert.
    """
    started = time.monotonic()
    if digests:
        source.guard.keep_digests()
    check_forms(plan)
    scales = read_input_scales(source, plan)
    team = ProcessGroup.of_environment() if in_team else None
    staging = plan_staging(plan.blocks, resources, reads_ahead=source.reads_ahead)
    meter = Meter(plan.num_bytes_read, len(plan.units), progress, None if team is None else team.count)
    work = _Conversion(
        source, plan, out, resources, staging, meter, StageProfile(), team, scales, cache or CachePolicy()
    )
    try:
        if team is not None and team.rank > 0:
            outcome = _help(work, team)
        else:
            outcome = _lead(work, resume=resume, overwrite=overwrite)
    except BaseException as error:
        if team is not None:
            team.fail(error)
        raise
    if team is not None:
        team.part()
    return work.report(outcome, time.monotonic() - started)


@dataclass(frozen=True)
class _Conversion:
    """What one process does, with what, and who does it beside it."""

    source: Source
    plan: ConversionPlan
    out: Path
    resources: Resources
    staging: Staging
    meter: Meter
    profile: StageProfile
    team: ProcessGroup | None
    scales: Mapping[str, InputScales]
    cache: CachePolicy

    def missing(self, done: Collection[str]) -> list[OutputUnit]:
        """The groups that are not done, in the order of their work."""
        missing = [unit for unit in self.plan.units if unit.name not in done]
        return missing if self.source.listing is None else in_stretches(self.source, missing)

    def run(self, folder: Destination, done: Collection[str]) -> None:
        """Convert the groups that are not done, or this process's share of them."""
        missing = self.missing(done)
        supply = HubPrefetch(self.source, missing, self.cache, folder.notes, is_shared=self.team is not None)
        units = missing if self.team is None else self.team.deal(missing)
        with bounded_gpu(self.resources):
            words = (self.source, folder, self.resources, self.staging, self.meter, self.profile, self.scales)
            Executor(*words, supply).run(units)

    def check_cache(self, done: Collection[str], num_bytes_out: int) -> None:
        """Refuse to start where the Hub's cache has no room for what will be fetched. Raises as `check_room`."""
        if self.source.listing is not None:
            use = replace(self.cache, keeps=self.cache.keeps or self.team is not None)
            check_room(self.source, self.missing(done), use, self.out, num_bytes_out)

    def report(self, outcome: _Outcome, seconds: float) -> ConversionReport:
        """What was done."""
        return ConversionReport(
            out=self.out,
            plan=self.plan,
            num_blocks=len(self.plan.blocks),
            num_ranks=self.plan.num_ranks,
            num_bytes_in=self.source.total_bytes,
            num_bytes_out=self.plan.num_bytes_out,
            num_groups_resumed=outcome.num_resumed,
            errors=outcome.errors,
            seconds=seconds,
            num_workers=self.staging.num_lanes,
            manifest_sha256=sha256_of(self.out / artifact_names.MANIFEST),
            profile={**self.profile.to_dict(), "staging": self.staging.to_dict()},
            was_finished=not outcome.is_new,
            warnings=(*self.plan.warnings, *outcome.warnings),
        )


@dataclass(frozen=True)
class _Outcome:
    is_new: bool
    num_resumed: int
    errors: dict[str, dict[str, Any]]
    warnings: list[str] = field(default_factory=list)


def _lead(work: _Conversion, *, resume: bool, overwrite: bool) -> _Outcome:
    """Take the folder, convert, and seal: what a process alone does, and the first of several."""
    source, plan, team = work.source, work.plan, work.team
    identity, num_bytes_out = _identity(source, plan), plan.num_bytes_out + plan.num_bytes_beside
    if not resume:
        work.check_cache((), num_bytes_out)
    with OutputFolder(work.out, identity, plan.paths) as folder:
        is_new = folder.start(num_bytes_out, resume=resume, overwrite=overwrite)
        done = list(folder.done)
        if team is not None:
            words = {"is_new": is_new, "root": str(folder.root), "done": done, "identity": _digest(identity)}
            team.say("begun", words)
        if not is_new:
            errors, resumed = _finished_errors(source, plan, work.out), len(plan.units)
        else:
            if not folder.has_lock:
                folder.warnings.append("This file system has no locks: nothing keeps another process away.")
            resumed = len(done)
            _convert(work, folder)
            errors = {block.name: folder.done[block.name].measured for block in plan.blocks}
        if team is not None:
            team.say("sealed", True)
        return _Outcome(is_new, resumed, errors, folder.warnings)


def _convert(work: _Conversion, folder: OutputFolder) -> None:
    """Run the groups that are not done, copy the loose files, seal."""
    source, plan = work.source, work.plan
    for unit in plan.units:
        if unit.name in folder.done:
            work.meter.resume(unit.name, unit.num_bytes_read)
    missing = [unit for unit in plan.units if unit.name not in folder.done]
    num_bytes = sum(file.size_bytes for unit in missing for file in unit.files)
    check_space(folder.root, num_bytes + plan.num_bytes_beside)
    work.check_cache(folder.done, num_bytes + plan.num_bytes_beside)
    work.run(folder, list(folder.done))
    for entry in () if work.team is None else work.team.collect():
        folder.record(entry)
    beside = write_beside(source, plan, folder.root)
    measured = {name: Measured(entry.measured, entry.sums) for name, entry in folder.done.items()}
    records = [record for unit in plan.units for record in folder.done[unit.name].files]
    digests = source_digests(source, plan, folder.done.values())
    words = build_manifest(source, plan, measured, [*records, *beside], work.scales, digests)
    words = with_file(words, write_card(source, words, folder.root))
    manifest = sealed(words)
    write_whole(folder.root, artifact_names.SUMS, sums_bytes(words["files"], manifest))
    source.guard.check_unchanged()
    folder.seal(manifest)


def _help(work: _Conversion, team: ProcessGroup) -> _Outcome:
    """Do this process's share, in the folder that the first process took; wait until that one sealed it."""
    begun = team.hear("begun")
    identity = _identity(work.source, work.plan)
    if begun["identity"] != _digest(identity):
        raise OutputError(
            "The processes of this conversion do not see the same source, request and versions.",
            where=f"rank {team.rank}",
            expected="what rank 0 sees",
            remedy="Give all of them the same command, on a file system that they share.",
        )
    if begun["is_new"]:
        root = Path(begun["root"])
        with ProcessShare(root, team.rank) as share:
            work.run(share, begun["done"])
        team.hand_in(share.entries)
    team.hear("sealed")
    return _Outcome(begun["is_new"], len(begun["done"]), _finished_errors(work.source, work.plan, work.out))


def _digest(identity: Mapping[str, Any]) -> str:
    """Of what every process must see alike: the source's files too, whenever they were put there."""
    files = [{key: value for key, value in f.items() if key != "mtime_ns"} for f in identity["source files"]]
    return hashlib.sha256(json_bytes({**identity, "source files": files})).hexdigest()


def _identity(source: Source, plan: ConversionPlan) -> dict[str, Any]:
    """What a resumed run must have in common with the first."""
    return {
        "hqconv version": __version__,
        "humming-kernels version": version("humming-kernels"),
        "source files": [asdict(file) for file in source.files],
        **({} if source.revision is None else {"commit of the source": source.revision}),
        "source config": source.config,
        "source quantization": source.quantization,
        **plan.fingerprint(),
    }


def _finished_errors(source: Source, plan: ConversionPlan, out: Path) -> dict[str, dict[str, Any]]:
    """The errors that a finished artifact records. Raises OutputError where it was made by another request."""
    manifest = read_manifest(out)
    key = first_difference(source, plan, manifest)
    if key is not None:
        raise OutputError(
            f"The output folder holds a finished artifact that differs from this request in: {key}.",
            where=str(out),
            remedy="Choose another folder with -o, or replace the artifact with --overwrite.",
        )
    return {name: dict(words["quantization_error"]) for name, words in manifest["blocks"].items()}
