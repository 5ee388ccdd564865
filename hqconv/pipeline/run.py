"""Converts a checkpoint by its plan into an artifact: groups in order, the manifest last."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hqconv.checkpoint.folder import Checkpoint
from hqconv.formats.format import conversion_of
from hqconv.pipeline.workers import Report, Resources, Workers, count_workers
from hqconv.pipeline.writer import (
    FileRecord,
    GroupWriter,
    JournalEntry,
    OutputFolder,
    check_space,
    num_bytes_below,
    output_errors,
    sha256_of,
    write_whole,
)
from hqconv.plan.plan import BlockGroup, Group, Plan, Request
from hqconv.schemas import artifact
from hqconv.version import __version__


@dataclass(frozen=True)
class Summary:
    """What a finished conversion did. `errors`: block → projection → quantization error."""

    out: Path
    num_blocks: int
    num_ranks: int
    num_bytes_in: int
    num_bytes_out: int
    num_groups_resumed: int
    errors: dict[str, dict[str, Any]]
    seconds: float
    num_workers: int


def convert(
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path,
    resources: Resources,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = lambda group, num_bytes: None,
    on_group: Callable[[str, bool], None] = lambda group, resumed: None,
) -> Summary:
    """Write the planned artifact to `out`.

    `report` gets (group, source bytes) as work proceeds, from any thread; `on_group` (group, was resumed)
    when a group is complete. Raises InputError for bad weights, OutputError for the folder or the disk,
    RequestError if `resources` cannot hold one expert. After any failure, or a kill, `resume=True` goes on.
    """
    started = time.monotonic()
    blocks = [group.block for group in plan.block_groups]
    num_workers = count_workers(blocks, plan.request, resources)
    folder = OutputFolder(out, _identity(checkpoint, plan))
    if not out.exists() or overwrite:
        check_space(out, plan.num_bytes_out - (num_bytes_below(out) if overwrite else 0))
    folder.start(resume=resume, overwrite=overwrite)
    resumed = set(folder.done)
    _check_remaining_space(folder, plan)
    with Workers(checkpoint, plan.request, resources, num_workers) as workers:
        _run_groups(workers, plan, folder, report, on_group)
    loose = _copy_loose_files(checkpoint, plan, out)
    manifest = build_manifest(checkpoint, plan, folder, loose)
    folder.seal(_json_bytes(manifest))
    return Summary(
        out=out,
        num_blocks=len(blocks),
        num_ranks=len(plan.request.grid.ranks) if plan.request.layout == artifact.KERNEL else 1,
        num_bytes_in=checkpoint.total_bytes,
        num_bytes_out=plan.num_bytes_out,
        num_groups_resumed=len(resumed),
        errors={group.name: folder.done[group.name].measured for group in plan.block_groups},
        seconds=time.monotonic() - started,
        num_workers=num_workers,
    )


def _run_groups(
    workers: Workers,
    plan: Plan,
    folder: OutputFolder,
    report: Report,
    on_group: Callable[[str, bool], None],
) -> None:
    """Run the groups in order; one group is flushed and hashed while the next is converted."""
    with ThreadPoolExecutor(1, "hqconv-finish") as finisher:
        finishing: Future[None] | None = None
        for group in plan.groups:
            if group.name in folder.done:
                report(group.name, _source_bytes(group))
                on_group(group.name, True)
                continue
            writer = GroupWriter(folder.root, group.files)
            try:
                if isinstance(group, BlockGroup):
                    measured = workers.run_block(group, writer, report)
                else:
                    measured = workers.run_copy(group, writer, report)
                if finishing is not None:
                    finishing.result()
            except BaseException:
                writer.abandon()
                raise
            finishing = finisher.submit(_finish, group.name, writer, measured, folder, on_group)
        if finishing is not None:
            finishing.result()


def _finish(
    name: str,
    writer: GroupWriter,
    measured: dict[str, Any],
    folder: OutputFolder,
    on_group: Callable[[str, bool], None],
) -> None:
    try:
        records = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    folder.record(JournalEntry(name, records, measured))
    on_group(name, False)


def _source_bytes(group: Group) -> int:
    if isinstance(group, BlockGroup):
        return group.block.num_bytes
    return sum(ref.num_bytes for ref in group.refs)


def _check_remaining_space(folder: OutputFolder, plan: Plan) -> None:
    missing = [group for group in plan.groups if group.name not in folder.done]
    check_space(folder.root, sum(file.size_bytes for group in missing for file in group.files))


def _identity(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """What a resumed run must have in common with the first."""
    return {
        "hqconv version": __version__,
        "humming-kernels version": version("humming-kernels"),
        "source files": [asdict(file) for file in checkpoint.files],
        "source config": checkpoint.config,
        "source quantization": checkpoint.quantization,
        **plan.fingerprint(),
    }


def _copy_loose_files(checkpoint: Checkpoint, plan: Plan, out: Path) -> list[FileRecord]:
    """Copy the tokenizer and the like, and write config.json and the index of the ordinary shards."""
    written = []
    for name in plan.other_files:
        with output_errors(out / name):
            data = (checkpoint.root / name).read_bytes()
        write_whole(out / name, data)
        written.append(name)
    write_whole(out / artifact.CONFIG, _json_bytes(artifact_config(checkpoint, plan)))
    written.append(artifact.CONFIG)
    if len(set(plan.weight_map.values())) > 1:
        shards = {name: file for group in plan.groups for file in group.files for name in file.tensors}
        total = sum(shards[name].tensors[name].num_bytes for name in plan.weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(plan.weight_map.items()))}
        write_whole(out / artifact.INDEX, _json_bytes(index))
        written.append(artifact.INDEX)
    return [FileRecord(name, (out / name).stat().st_size, sha256_of(out / name)) for name in sorted(written)]


def artifact_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The source's config.json plus the artifact's quantization_config."""
    request = plan.request
    words = copy.deepcopy(checkpoint.config)
    if request.layout == artifact.CHECKPOINT:
        names = [block.name for block in plan.experts.blocks]
        words["quantization_config"] = artifact.humming_quantization_config(request.schema, names)
    else:
        words["quantization_config"] = artifact.hqconv_quantization_config(
            request.schema, request.input_schema, request.sm_version, checkpoint.quantization
        )
    return words


def build_manifest(
    checkpoint: Checkpoint, plan: Plan, folder: OutputFolder, loose: list[FileRecord]
) -> dict[str, Any]:
    """The words of hqconv.json, in an order that does not depend on how the conversion went."""
    request = plan.request
    entries = [folder.done[group.name] for group in plan.groups]
    files = sorted((r for r in [*(f for e in entries for f in e.files), *loose]), key=lambda r: r.path)
    return {
        "format_version": artifact.FORMAT_VERSION,
        "hqconv_version": __version__,
        "humming_kernels_version": version("humming-kernels"),
        "source": {
            "name": checkpoint.repo_id or checkpoint.name,
            "revision": checkpoint.revision,
            "quantization_config": checkpoint.quantization,
            "index_sha256": checkpoint.index_sha256,
            "files": [
                {"name": f.name, "size_bytes": f.size_bytes, "header_sha256": f.header_sha256}
                for f in checkpoint.files
            ],
        },
        "layout": request.layout,
        "schema_name": request.schema.name,
        "weight_schema": request.schema.humming_fields(),
        "input_schema": request.input_schema,
        "dtype": request.param_dtype,
        "target": f"sm{request.sm_version}",
        "tp": request.grid.tp,
        "ep": request.grid.ep,
        "expert_placement": request.grid.placement,
        "redundant_experts": request.grid.redundant,
        "family": plan.experts.family,
        "family_chosen_because": plan.experts.chosen_because,
        "blocks": {
            group.name: _block_words(group, folder.done[group.name].measured, request)
            for group in plan.block_groups
        },
        "files": {r.path: {"size_bytes": r.size_bytes, "sha256": r.sha256} for r in files},
        "tensors": {
            "converted": plan.experts.converted,
            "copied": list(plan.experts.copied),
            "dropped": plan.experts.dropped,
        },
    }


def _block_words(group: BlockGroup, errors: dict[str, Any], request: Request) -> dict[str, Any]:
    block = group.block
    words: dict[str, Any] = {
        "layer": block.layer,
        "num_experts": block.num_experts,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "activation": block.activation,
        "gated": block.gated,
        "top_k": block.top_k,
        "w13_order": ["gate", "up"] if block.gated else ["up"],
        "source_dtype": block.dtype,
        "source_format": block.format.words(),
        "source_parts": block.parts_words(),
        "conversion": conversion_of(block.format, request.schema, request.param_dtype),
        "quantization_error": errors,
    }
    for gemm, form in group.forms.items():
        words[gemm] = {
            "shape_n": form.config["shape_n"],
            "shape_k": form.config["shape_k"],
            "pad_shape_n": form.config["pad_shape_n"],
            "pad_shape_k": form.config["pad_shape_k"],
            "flags": form.flags,
        }
    return words


def _json_bytes(words: dict[str, Any]) -> bytes:
    return (json.dumps(words, indent=2, ensure_ascii=False) + "\n").encode()
