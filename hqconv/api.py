"""hqconv for programs: what the command line does, as functions. See docs/api.md.

Importing this module loads no torch; a function that needs it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqconv.conversion.options import (
    ConversionOptions,
    cache_use,
    check_modes,
    check_places,
    choose_device,
    choose_target,
    place_of,
    resources_of,
)
from hqconv.errors import OutputError, RequestError
from hqconv.io.hub_snapshot import is_repo_id, look
from hqconv.schemas.artifact_names import KERNEL
from hqconv.schemas.grid import LINEAR, Grid
from hqconv.schemas.input_schema import InputSchema
from hqconv.schemas.recipe import Override
from hqconv.schemas.weight_schema import SOURCE, WeightSchema
from hqconv.serving.warm.compile_kernels import warm as warm
from hqconv.sources.opening import open_headers, open_source, own_target, without_gc

if TYPE_CHECKING:
    import torch

    from hqconv.artifact.load import RankGemm
    from hqconv.conversion.progress import Progress
    from hqconv.conversion.push import PushReport
    from hqconv.conversion.run import ConversionReport
    from hqconv.models.protocols import SourceHeaders
    from hqconv.planning.plan import ConversionPlan
    from hqconv.verification.result import VerificationReport


def plan(
    src: str | Path,
    *,
    schema: str | Path | WeightSchema,
    target: str | None = None,
    dtype: str | None = None,
    tp: int = 1,
    ep: int = 1,
    expert_placement: str = LINEAR,
    redundant_experts: int = 0,
    layout: str = KERNEL,
    input_schema: str | Path | InputSchema = "a16",
    cuda: str | None = None,
    overrides: Sequence[Override] = (),
    round_scales: bool = False,
    quantizer: str = "rtn",
    importance: str | Path | None = None,
    allow_unserved: bool = False,
    revision: str | None = None,
    device: str = "auto",
) -> ConversionPlan:
    """Plans a conversion from headers and config alone: what every output file holds, and where.

    src, schema, target, dtype, tp, ep, expert_placement, redundant_experts, layout, input_schema, cuda, overrides,
    round_scales, quantizer, importance, allow_unserved, revision: as of `convert`; of a Hub repo only headers are read.
    device: where `target` None takes it from.

    Raises the errors that `convert` raises before it writes.
    """
    with open_headers(src, revision) as source:
        own = own_target(source) if schema == SOURCE else None
        on = choose_target(target, cuda, layout, choose_device(device), own)
        grid = Grid(tp, ep, expert_placement, redundant_experts)
        options = (schema, dtype, grid, on, layout, input_schema, tuple(overrides), round_scales)
        wanted = ConversionOptions(*options, quantizer, importance, allow_unserved)
        return wanted.plan(source)


def convert(
    src: str | Path,
    out: str | Path | None = None,
    *,
    schema: str | Path | WeightSchema,
    target: str | None = None,
    dtype: str | None = None,
    tp: int = 1,
    ep: int = 1,
    expert_placement: str = LINEAR,
    redundant_experts: int = 0,
    layout: str = KERNEL,
    input_schema: str | Path | InputSchema = "a16",
    cuda: str | None = None,
    overrides: Sequence[Override] = (),
    round_scales: bool = False,
    quantizer: str = "rtn",
    importance: str | Path | None = None,
    allow_unserved: bool = False,
    revision: str | None = None,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    max_gpu_memory: str | int | None = None,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    source_digests: bool = False,
    on_plan: Callable[[ConversionPlan, Path], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    in_team: bool = False,
    cache_limit: str | int | None = None,
    keep_source: bool = False,
) -> ConversionReport:
    """Converts a model's experts: `src` to an artifact at `out`. See docs/api.md.

    src: a model folder, a Hub repo id (at `revision`), GGUF files, an artifact. out: None: `./<model>-<schema>…`.
    schema: a preset, a shorthand, a path ending in .toml, a `WeightSchema`, or "source". target: the serving GPU, sm75
    …; None: the one here. dtype: bfloat16 or float16; None: the checkpoint's.
    tp, ep: ranks. expert_placement: linear, round_robin. redundant_experts: copies. layout: kernel, checkpoint.
    input_schema: as schema. cuda: "13.0", where layouts depend on it. overrides: of blocks, from
    `hqconv.schemas.recipe.load_recipe`. round_scales: codes kept, scales rounded. quantizer: rtn, mse; importance: a
    file that weights it. allow_unserved: also what no server runs. device: auto, cpu, cuda, cuda:N; same bytes.
    max_memory, max_gpu_memory: bytes or "4GiB". threads: None is all. resume, overwrite: go on; replace.
    source_digests: hash the source's files, for the manifest. cache_limit: of what is fetched from the Hub at a time;
    None: four shards. keep_source: nothing of it is dropped. on_plan, progress: called. in_team: share under torchrun.
    Raises RequestError, InputError (also of a damaged artifact as a source), OutputError or NetworkError.
    """
    modes: dict[str, Any] = check_modes(resume=resume, overwrite=overwrite)
    modes["cache"] = cache_use(cache_limit, keep_source=keep_source)
    grid = Grid(tp, ep, expert_placement, redundant_experts)
    from hqconv.conversion.run import convert as run  # all libraries are loaded before the work begins

    resources = resources_of(device, max_memory, max_gpu_memory, threads, in_team=in_team)
    with open_source(src, revision, is_lazy=True) as source:
        own = own_target(source) if schema == SOURCE else None
        on = choose_target(target, cuda, layout, resources.device_name, own)
        options = (schema, dtype, grid, on, layout, input_schema, tuple(overrides), round_scales)
        planned = ConversionOptions(*options, quantizer, importance, allow_unserved).plan(source)
        place = _announced(source, planned, out, on_plan)
        words = {**modes, "in_team": in_team, "digests": source_digests}
        return run(source, planned, place, resources, **words, progress=progress)


def _announced(
    source: SourceHeaders,
    planned: ConversionPlan,
    out: str | Path | None,
    on_plan: Callable[[ConversionPlan, Path], None] | None,
) -> Path:
    """Where the artifact goes, once the caller knows."""
    place = check_places(source.root, place_of(planned, out))
    if on_plan is not None:
        on_plan(planned, place)
    return place


@without_gc()
def describe_plan(
    planned: ConversionPlan,
    out: str | Path | None = None,
    *,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    max_gpu_memory: str | int | None = None,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """A plan in words, with the memory it will take and what stands in its way at `out`; writes nothing.

    planned: of `plan`. The other parameters are those of `convert`. Raises RequestError where the memory is not enough
    or there is no such device.
    """
    from hqconv.reports.plan import describe_plan as describe
    from hqconv.reports.plan import output_notes

    place, resources = place_of(planned, out), resources_of(device, max_memory, max_gpu_memory, threads)
    try:
        check_places(Path(planned.source.folder), place)
        notes = output_notes(place, planned, resume=resume, overwrite=overwrite)
    except OutputError as error:
        notes = [error.message()]
    words = describe(planned, resources)
    return {**words, "device": resources.device_name, "out": str(place), "notes": notes}


def verify(
    out: str | Path,
    source: str | Path | None = None,
    *,
    checks: Sequence[str] | None = None,
    layers: Collection[int] | None = None,
    tokens: Sequence[int] = (1, 17, 256),
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
    max_error: float | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> VerificationReport:
    """Proves an artifact: its files, its weights, and the production kernel on them; against its `source` where given.

    out: the artifact, a folder or a Hub repo (of which only what the checks read is downloaded). source: what it was
    made from, as `src` of `convert`, with `revision`; None: it is only held against itself, and `revision` is its own.
    checks: of files, weights and kernel; None: all that can run here. layers: the MoE layers to look at; None: all, for
    the kernel the first, the middle and the last. tokens: batch sizes for the kernel. device: auto, cpu, cuda or
    cuda:N; the kernel needs a GPU of the artifact's target. max_memory: "4GiB" or bytes, of the experts at work.
    threads: workers; None: all processors. max_error: the largest relative error that a projection may have, recorded
    or measured; larger ones are findings. progress: called with `files` or `weights` and how far that check is.

    Whatever is wrong with the artifact is in the report, also that its manifest cannot be relied on. Raises
    RequestError where `out` is no artifact or a check cannot run, and what opening the source raises: RequestError,
    InputError or NetworkError.
    """
    from hqconv.verification.run import VerifyOptions
    from hqconv.verification.run import verify as run

    resources = resources_of(device, max_memory, None, threads)
    options = VerifyOptions(
        checks=None if checks is None else tuple(checks),
        layers=None if layers is None else frozenset(layers),
        tokens=tuple(tokens),
        device=None if device == "auto" else resources.device,
        num_threads=resources.num_threads,
        max_memory_bytes=resources.max_memory_bytes,
        source=None if source is None else str(source),
        max_error=max_error,
        progress=progress,
    )
    is_folder = not is_repo_id(str(out))
    if source is None and revision is not None and is_folder:
        what, remedy = "A revision is of a source.", "Name the source, or leave the revision out."
        raise RequestError(what, where="--revision", found=revision, remedy=remedy)
    root, listing = (Path(out), None) if is_folder else look(str(out), revision if source is None else None)
    with nullcontext(None) if source is None else open_source(source, revision) as opened:
        return run(root, opened, options, listing)


@without_gc()
def inspect(path: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """What a model folder, a Hub repo or an artifact holds, in words; reads headers only. `kind` says which it is.

    path: as `src` of `convert`, or an unfinished conversion. revision: a branch, tag or commit of a Hub repo.

    Raises RequestError, InputError, VerificationError (of a damaged artifact) or NetworkError.
    """
    from hqconv.reports.inspect import inspect as run

    return run(path, revision)


def push(
    out: str | Path,
    repo: str,
    *,
    private: bool = False,
    branch: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> PushReport:
    """Puts an artifact into a repo of the Hub, its manifest last; what is there already is not sent again.

    out: the artifact. repo: org/name, made if it is not there. private: make it private. branch: None is the repo's
    main one. announce: called with a sentence before each commit.

    Raises RequestError where `out` is no artifact or the Hub refuses, VerificationError where the artifact is not whole
    or a file arrived otherwise, OutputError where the repo holds files of others, NetworkError.
    """
    from hqconv.conversion.push import push as run
    from hqconv.io.hub_upload import HubBranch

    return run(Path(out), HubBranch(repo, branch), private=private, announce=announce)


def load(
    path: str | Path, *, block: str, tp_rank: int = 0, ep_rank: int = 0, device: str = "cpu"
) -> dict[str, RankGemm]:
    """One MoE block of one rank of a kernel artifact: `w13`, `w2` → Humming's LayerConfig and kernel tensors.

    path: the artifact. block: its name, such as model.layers.0.mlp.experts. tp_rank, ep_rank: whose file. device: where
    the tensors go: auto, cpu, cuda or cuda:N.

    Returns tensors as they lie in the file, experts of the rank first: `weight` int32 [E_local, …], `weight_scale`,
    where the schema has them `zero_point` and `weight_scale_2`, and `bias`; shapes and dtypes are Humming's for the
    target. Of static activations also `input_scale`, float32 [1], for all experts. Nothing is changed about Humming in
    this process. Raises RequestError where `path` is no kernel artifact or has no such block or rank, or there is no
    such device; VerificationError where a file is damaged.
    """
    from hqconv.artifact.load import load_block

    return load_block(path, block, tp_rank, ep_rank, choose_device(device))


def dequantize(path: str | Path, *, block: str) -> dict[str, torch.Tensor]:
    """One block's experts as float32, decoded from the kernel layout and put together from all ranks.

    path: the artifact. block: its name, such as model.layers.0.mlp.experts.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError where `path` is no kernel artifact or has no such block, VerificationError
    where a file is damaged.
    """
    from hqconv.artifact.load import dequantize as run

    return run(path, block)
