"""Python API of hqconv: the command line's commands as functions. See docs/api.md.

`**options` are fields of `ConversionArguments` and `RunOptions` (`schemas.options`), which have their help texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hqconv.artifact.error_summary import over_limits
from hqconv.artifact.manifest import Manifest
from hqconv.conversion.option_values import (
    cache_policy,
    check_places,
    choose_device,
    choose_target,
    parse_bytes,
    place_of,
    resources_of,
    start_gpu,
)
from hqconv.conversion.stages import Progress
from hqconv.errors import InputError, OutputError, RequestError
from hqconv.io.hub import is_repo_id, open_repo
from hqconv.models.source_protocol import Source
from hqconv.planning.plan import ConversionPlan, plan_conversion
from hqconv.planning.spec import ConversionOptions
from hqconv.schemas.options import (
    BUILTIN,
    NOT_ALLOCATED,
    CheckName,
    ConversionArguments,
    ConversionKeywords,
    ConvertKeywords,
    RunKeywords,
    RunOptions,
    refuse_unknown_checks,
    split_options,
    with_recipe,
)
from hqconv.schemas.weight_schema import SOURCE
from hqconv.sources.opening import open_source, parse_source_name, pinned_name, without_gc

if TYPE_CHECKING:
    import torch

    from hqconv.artifact.load import RankGemm
    from hqconv.conversion.convert import ConversionReport
    from hqconv.conversion.push import PushReport
    from hqconv.verification.result import VerificationReport

StrPath = str | Path
OnPlan = Callable[[ConversionPlan, Path], None]
OnProgress = Callable[[Progress], None]
Say = Callable[[str], None]


def _parse(config: StrPath | None, options: Mapping[str, Any]) -> ConversionOptions:
    """Parse the options of a conversion, with a recipe's for those that are not given."""
    return ConversionOptions.parse(**with_recipe(config, options))


def _plan(parsed: ConversionOptions, source: Source, device: str) -> ConversionPlan:
    target = choose_target(parsed, source, device)
    with without_gc():
        return plan_conversion(parsed.calibrated(device), source, target)


def plan(
    src: StrPath,
    *,
    config: StrPath | None = None,
    revision: str | None = None,
    device: str = "auto",
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Plan a conversion from headers and config alone: the tensors of every output file, and their places.

    src, config, revision, options: as of `convert`; of a Hub repo only headers are read. device: the GPU that an open
    `target` stands for. Raises the errors that `convert` raises before it writes.
    """
    parsed = _parse(config, options)
    device = choose_device(device)
    with open_source(src, revision, is_lazy=True) as source:
        return _plan(parsed, source, device)


def convert(
    src: StrPath,
    out: StrPath | None = None,
    *,
    config: StrPath | None = None,
    revision: str | None = None,
    evaluate: StrPath | None = None,
    max_kl: float | None = None,
    on_plan: OnPlan | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConversionReport:
    """Convert a model's experts: `src` to an artifact at `out`. See docs/api.md.

    src: a model folder, a Hub repo id (at `revision`), GGUF files, an artifact. out: None for `./<model>-<schema>…`.
    config: a recipe, i.e. a TOML file or the name of a packaged one; options that are given and not None win.
    evaluate: a text that the finished artifact is evaluated on, as by `hqconv.evaluate`; None for what `calibrate` does
    not read of its own. max_kl: the evaluation must be possible; whether its mean divergence is larger stands in
    `report.over_max_kl`. on_plan: called with the plan and the output folder before anything is written. progress:
    called from worker threads.
    options: those of `ConversionArguments` decide the artifact; a schema may be a `WeightSchema`, activations an
    `InputSchema`. Those of `RunOptions` decide how the work is done. Parts (`part`) run
    at the same time or not, and go on after a kill without `resume`; the last one finishes the artifact
    (`report.is_complete`).
    Raises RequestError, InputError (also of a damaged artifact as a source), OutputError or NetworkError.
    """
    from hqconv.conversion.output_folder import Part

    arguments, run = split_options(options)
    part = None if run.part is None else Part.parse(run.part)
    cache = cache_policy(run)
    parsed = _parse(config, arguments)
    start_gpu(run.device, is_part=part is not None)  # beside all that comes before its use
    # All libraries are loaded before the work begins.
    from hqconv.conversion.convert import convert as run_conversion
    from hqconv.evaluation.evaluate import held_out, with_evaluation

    resources = resources_of(run)
    with open_source(src, revision, is_lazy=True) as source:
        planned = _plan(parsed, source, resources.device_name)
        place = check_places(source.place, place_of(planned, out))
        text = held_out(
            source,
            planned.spec.encoding.calibration,
            None if evaluate is None else Path(evaluate),
            is_gated=max_kl is not None,
        )
        if on_plan is not None:
            on_plan(planned, place)
        report = run_conversion(
            source,
            planned,
            place,
            resources,
            resume=run.resume,
            overwrite=run.overwrite,
            update=run.update,
            part=part,
            progress=progress,
            digests=run.source_digests,
            cache=cache,
            # A part sees its own layers only.
            held_out=text.batches(source, resources.device) if part is None else (),
            finish=partial(
                with_evaluation, source=source, text=text, resources=resources, max_kl=max_kl
            ),
        )
    if not report.is_complete:
        return report
    over = over_limits(report.errors, report.evaluation, None, max_kl)
    return replace(report, over_max_kl=over["over_max_kl"])


def allocate(
    src: StrPath,
    out: StrPath | None = None,
    *,
    size: str | int | None = None,
    bits: float | None = None,
    candidates: str | Sequence[str] | None = None,
    revision: str | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[ConvertKeywords],
) -> dict[str, Any]:
    """Choose a schema for each GEMM of each MoE layer by measured losses within a budget, and write a recipe.

    The model runs once over the text `calibrate`, `builtin` if none is given. Every candidate is quantized as `convert`
    does with that text, which is a key of the recipe. out: the recipe, a TOML file for `convert(config=…)`; None for
    `./<model>-<budget>.toml`.
    An earlier recipe is replaced. size: bytes of the experts' tensors on all ranks, padding included, or text such as
    "120GB"; bits: the same as mean bits for each weight of the experts, to two decimals. One of the two is needed.
    candidates: schemas as of `convert`, as a list or with commas between; None for a list that fits the target.
    src, revision, progress, options: as of `convert`.
    Raises RequestError also for a budget that no choice keeps, InputError, OutputError or NetworkError.
    """
    arguments, run = split_options(options)
    if unknown := arguments.keys() & set(NOT_ALLOCATED):
        raise TypeError(f"unexpected keyword argument '{min(unknown)}'")
    if (size is None) == (bits is None):
        raise RequestError(
            "An allocation needs one budget.",
            where="--size, --bits",
            expected="either --size or --bits",
        )
    if arguments.get("calibrate") is None:
        arguments["calibrate"] = BUILTIN
    given = {
        option.name: arguments[option.name]
        for option in fields(ConversionArguments)
        if arguments.get(option.name, option.default) not in (option.default, None)
    }
    parsed = _parse(None, {**arguments, "schema": "mxfp4"})  # a candidate has its own
    size_bytes = None if size is None else parse_bytes(size, "--size")
    if isinstance(candidates, str):
        candidates = candidates.replace(" ", "").split(",")
    start_gpu(run.device)
    # All libraries are loaded before the work begins.
    from hqconv.conversion.allocate import run_allocation

    resources = resources_of(run)
    with open_source(src, revision) as source:
        target = choose_target(parsed, source, resources.device_name)
        budget = f"{bits:g}bits" if size is None else str(size).replace(" ", "")
        place = Path(f"{source.name}-{budget}.toml" if out is None else out)
        return run_allocation(
            source,
            parsed,
            target,
            candidates,
            size_bytes,
            bits,
            given,
            check_places(source.place, place),
            resources,
            progress,
        )


def describe_plan(
    planned: ConversionPlan, out: StrPath | None = None, **options: Unpack[RunKeywords]
) -> dict[str, Any]:
    """Describe a plan as a document, with the memory it needs and the obstacles at `out`; writes nothing.

    planned: the result of `plan`. out, options: as of `convert`. Raises RequestError if memory is short or the device
    is missing.
    """
    from hqconv.reports.documents import describe_plan as describe
    from hqconv.reports.documents import output_notes

    run = RunOptions(**options)
    place = place_of(planned, out)
    resources = resources_of(run)
    with without_gc():
        document = describe(planned, resources)
        try:
            check_places(Path(planned.source.folder), place)
            notes = output_notes(
                place,
                planned,
                resume=run.resume or run.part is not None,
                overwrite=run.overwrite or run.update,
            )
        except OutputError as error:
            notes = [str(error)]
    return {**document, "device": resources.device_name, "out": str(place), "notes": notes}


def verify(
    out: StrPath,
    source: StrPath | None = None,
    *,
    checks: Sequence[CheckName] | None = None,
    layers: Collection[int] | None = None,
    tokens: Sequence[int] = (1, 17, 256),
    max_error: float | None = None,
    server: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    progress: Callable[[str, Progress], None] | None = None,
    **options: Unpack[RunKeywords],
) -> VerificationReport:
    """Verify an artifact: its files, its weights, and the production kernel on them; against its `source`, if given.

    out: the artifact, a folder or a Hub repo (of which only what the checks read is downloaded). source: its
    source, as `src` of `convert`, with `revision`; None: only the artifact's own records, `revision` is the artifact's.
    checks: of files, weights and kernel; None: all that can run here. layers: the MoE layers to look at; None: all, for
    the kernel the first, the middle and the last. tokens: batch sizes for the kernel. max_error: the largest relative
    error that a projection may have, recorded or measured; larger ones are findings. server: the address of a running
    server of the artifact, or of a plain checkpoint with reference predictions (`evaluate`); its check runs alone, or
    with those that `checks` names. model: its name, if the server has several. progress: called with `files`,
    `weights` or `server` and how far that check is. options: `device` (the kernel needs a GPU of the artifact's
    target), `max_memory`, `threads`; `cache_limit` and `keep_source` for a source on the Hub.

    All faults of the artifact are in the report, also an unreliable manifest. Raises RequestError where `out` is no
    artifact or a check cannot run; opening the source raises RequestError, InputError or NetworkError, and so does a
    server that does not answer.
    """
    run = RunOptions(**options)
    if server is not None and checks is None:
        run = replace(run, device="cpu")  # the GPU is the server's
    start_gpu(run.device)
    from hqconv.verification.server import ServerOptions
    from hqconv.verification.verify import VerifyOptions
    from hqconv.verification.verify import verify as run_checks

    resources = resources_of(run)
    what = VerifyOptions(
        checks=None if checks is None else tuple(checks),
        layers=None if layers is None else frozenset(layers),
        tokens=tuple(tokens),
        device=None if run.device == "auto" else resources.device,
        num_threads=resources.num_threads,
        max_memory_bytes=resources.max_memory_bytes,
        source=None if source is None else str(source),
        max_error=max_error,
        server=None if server is None else ServerOptions(server, model, progress),
        cache=cache_policy(run),
        progress=progress,
    )
    own_revision = revision if source is None else None
    name, own_revision, _ = parse_source_name(str(out), own_revision)
    with ExitStack() as stack:
        root = Path(name)
        listing = None
        if is_repo_id(name):
            root, listing = open_repo(name, own_revision)
        elif own_revision is not None:
            raise RequestError(
                "A revision is of a source.",
                where="--revision",
                found=own_revision,
                remedy="Name the source, or leave the revision out.",
            )
        opened = None
        if source is not None:
            opened = stack.enter_context(open_source(source, revision, is_lazy=True))
        return run_checks(root, opened, what, listing)


def check(
    checkpoint: StrPath,
    against: StrPath | None = None,
    *,
    layers: Collection[int] | None = None,
    sample: int | None = None,
    revision: str | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[RunKeywords],
) -> dict[str, Any]:
    """Check a published checkpoint, alone or against the one that it was made from; return a document (docs/check.md).

    checkpoint: as `src` of `convert`, at `revision`. against: the original in any form, `org/name@REVISION` of a repo.
    layers: the MoE layers to look at; None: all. sample: experts of each layer, evenly spread; None: all. On the Hub a
    sample is read by byte ranges. progress: called with how far it is. options: `max_memory`, `threads`, and for each
    of the two `cache_limit` and `keep_source`.

    `passed` is False if something is surely wrong (`damage`); what may be is in `notices`. A checkpoint that
    contradicts itself is damaged. Raises RequestError for a checkpoint that hqconv does not know, unknown layers, and
    an original of other sizes; InputError for an original that contradicts itself, and for files that the system does
    not let it read; NetworkError.
    """
    from hqconv.checkup.check import CheckOptions, broken_checkpoint, of_original, run_check

    run = RunOptions(**options)
    resources = resources_of(replace(run, device="cpu"))
    what = CheckOptions(
        layers=None if layers is None else frozenset(layers),
        sample=sample,
        num_threads=resources.num_threads,
        max_memory_bytes=resources.max_memory_bytes,
        cache=cache_policy(run),
        progress=progress,
    )
    with ExitStack() as stack:
        original = None
        if against is not None:
            with of_original():
                original = stack.enter_context(open_source(against, is_lazy=True))
        try:
            source = stack.enter_context(open_source(checkpoint, revision, is_lazy=True))
        except InputError as error:
            return broken_checkpoint(str(checkpoint), error)
        return run_check(source, original, what)


def inspect(path: StrPath, *, revision: str | None = None) -> dict[str, Any]:
    """Describe a model folder, a Hub repo or an artifact as a document, from headers only. `kind` names which.

    path: as `src` of `convert`, or an unfinished conversion. revision: a branch, tag or commit of a Hub repo.

    Raises RequestError, InputError, VerificationError (of a damaged artifact) or NetworkError.
    """
    from hqconv.reports.documents import inspect as run

    with without_gc():
        return run(path, revision)


def push(
    out: StrPath,
    repo: str,
    *,
    private: bool = False,
    branch: str | None = None,
    announce: Say | None = None,
) -> PushReport:
    """Push an artifact to a repo of the Hub: files are uploaded first, then one commit replaces an older artifact.

    out: the artifact. repo: org/name, created if missing. private: create it as private. branch: None is the repo's
    main one. announce: called with a sentence before each upload. Files that the repo holds already are not sent again.

    Raises RequestError where `out` is no artifact or the Hub refuses, VerificationError where a file is not what the
    manifest lists, OutputError where the repo holds foreign files or the artifact changes meanwhile, NetworkError.
    Nothing is published then: until the commit the branch stays as it is.
    """
    from hqconv.conversion.push import push as run

    return run(Path(out), repo, branch, private=private, announce=announce)


def evaluate(
    out: StrPath,
    source: StrPath | None,
    text: StrPath,
    *,
    write_reference: bool = False,
    num_tokens: int = 16384,
    context_length: int = 512,
    compute_dtype: str = "float32",
    revision: str | None = None,
    **options: Unpack[RunKeywords],
) -> dict[str, Any]:
    """Evaluate an artifact: KL divergence and perplexity of its weights against the source's on a text.

    Both run in transformers, layer by layer: the weights of one layer are in memory at a time. Activations are not
    quantized. out: the artifact. source: the checkpoint that it was made from, as `src` of `convert`, at `revision`.
    text: a text file that calibration did not see. num_tokens: tokens of the text that are read. context_length:
    tokens of one sequence. compute_dtype: float32, bfloat16 or float16, of weights and hidden states. options:
    `device`, `threads`, and `max_memory`: on the CPU, of hidden states, one layer and logits; on a GPU its free memory
    is the limit.

    The document is written beside the artifact too, as evaluation.json, from where the report takes it; where that
    cannot be done, a warning says so. So are the predictions, as reference.safetensors, which `verify(server=…)`
    compares a server with. write_reference, and no source: `out` is a plain checkpoint that transformers runs, which
    gets its reference predictions; it is compared with itself.

    Returns a document: `kl` (`mean`, `standard_error`, `median`, `p90`, `p99`, `max`; nats per token), `perplexity`
    and `mean_nll` (each of `source` and `artifact`), `top1_agreement` (share of tokens with the same most likely
    prediction), the conditions, and `warnings`. Raises RequestError where transformers is missing or cannot run the
    model, the source is another one, or memory is short; VerificationError for a damaged artifact, InputError,
    NetworkError.
    """
    from hqconv.evaluation.evaluate import evaluate as run

    if source is None and not write_reference:
        raise RequestError(
            "An artifact is evaluated against its source.",
            where="--source",
            found="none",
            remedy="Name the source; for a plain checkpoint, use --write-reference.",
        )
    return run(
        Path(out),
        None if source is None else str(source),
        Path(text),
        num_tokens=num_tokens,
        context_length=context_length,
        compute_dtype=compute_dtype,
        resources=resources_of(RunOptions(**options)),
        revision=revision,
    )


@dataclass(frozen=True)
class PublishReport:
    """The result of a publication.

    source: name and commit. commit: of the branch that holds the artifact; None if nothing was published. converted,
    verified, pushed: the steps' reports. seconds: their times. evaluation: of the artifact. over_max_error: projections
    above the error limit, the worst first. over_max_kl: the divergence is above its limit, or not known.
    was_published: the repo held the artifact of this request and source before, and no step ran.
    """

    source: dict[str, Any]
    repo: str
    branch: str | None
    commit: str | None = None
    manifest_sha256: str = ""
    was_published: bool = False
    out: Path | None = None
    converted: ConversionReport | None = None
    verified: VerificationReport | None = None
    pushed: PushReport | None = None
    evaluation: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    over_max_error: list[dict[str, Any]] = field(default_factory=list)
    over_max_kl: bool = False

    @property
    def passed(self) -> bool:
        """True if the repo holds the artifact, and nothing is above a limit."""
        return self.commit is not None and not self.over_max_error and not self.over_max_kl

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        document = {"kind": "publication", **vars(self), "passed": self.passed}
        document["out"] = None if self.out is None else str(self.out)
        for step in ("converted", "verified", "pushed"):
            if document[step] is not None:
                document[step] = document[step].to_dict()
        return document


def publish(
    src: StrPath,
    repo: str,
    out: StrPath | None = None,
    *,
    config: StrPath | None = None,
    revision: str | None = None,
    private: bool = False,
    branch: str | None = None,
    checks: Sequence[CheckName] | None = None,
    max_error: float | None = None,
    evaluate: StrPath | None = None,
    max_kl: float | None = None,
    on_plan: OnPlan | None = None,
    progress: OnProgress | None = None,
    check_progress: Callable[[str, Progress], None] | None = None,
    announce: Say | None = None,
    **options: Unpack[ConvertKeywords],
) -> PublishReport:
    """Convert a model, verify the artifact against it, and push it: each step only if it is necessary.

    Nothing is converted if the repo holds the artifact of this request and source already. Else the artifact at `out`
    is updated (as `convert(update=True)`), verified and pushed. An artifact with a finding, an error above `max_error`
    or a divergence above `max_kl` is not pushed, nor one that replaced the converted one meanwhile. Limits are judged
    for a published artifact too, `max_kl` by the repo's evaluation.json of that artifact; without one it is not kept.
    After a kill at any moment the same call ends at the same commit.

    src, out, config, revision, evaluate, max_kl, on_plan, progress, options: as of `convert`. checks, max_error: as of
    `verify`, whose progress is check_progress. repo, private, branch, announce: as of `push`.
    Raises what `convert`, `verify` and `push` raise.
    """
    from hqconv.conversion.push import push as push_artifact

    refuse_unknown_checks(checks)
    arguments, run = split_options(options)
    with open_source(src, revision, is_lazy=True) as source:
        src, revision = pinned_name(str(src), revision, source)  # all steps read this commit
        parsed = _parse(config, arguments)
        planned = _plan(parsed, source, choose_device(run.device))
        found = _published(repo, branch, planned, source, private=private)
    report = PublishReport(planned.source.origin, repo, branch)
    if found is not None:
        manifest, commit, evaluation = found
        over = over_limits(manifest.errors(), evaluation, max_error, max_kl)
        report = replace(report, commit=commit, was_published=True, evaluation=evaluation)
        return replace(report, manifest_sha256=manifest.sha256, **over)
    options["update"] = True
    if planned.spec.target.cuda is None:  # `convert` need not choose again
        options["target"] = planned.spec.target.name
    if parsed.is_schema_open:
        options["schema"] = SOURCE if planned.spec.must_be_direct else planned.spec.schema
    converted = convert(
        src,
        out,
        config=config,
        revision=revision,
        evaluate=evaluate,
        max_kl=max_kl,
        on_plan=on_plan,
        progress=progress,
        **options,
    )
    out = converted.out
    digest = converted.manifest_sha256
    over = over_limits(converted.errors, converted.evaluation, max_error, max_kl)
    seconds = {"converted": converted.seconds}
    report = replace(report, converted=converted, out=out, manifest_sha256=digest, seconds=seconds)
    report = replace(report, evaluation=converted.evaluation, **over)
    if report.over_max_error or report.over_max_kl:
        return report
    begun_s = time.monotonic()
    verified = verify(
        out,
        src,
        revision=revision,
        checks=checks,
        max_error=max_error,
        progress=check_progress,
        **vars(run),
    )
    seconds["verified"] = time.monotonic() - begun_s
    begun_s = time.monotonic()
    report = replace(report, verified=verified)
    if not verified.passed or verified.manifest_sha256 != digest:
        return report
    pushed = push_artifact(
        out, repo, branch, private=private, announce=announce, manifest_sha256=digest
    )
    seconds["pushed"] = time.monotonic() - begun_s
    return replace(report, pushed=pushed, commit=pushed.commit)


def _published(
    repo: str, branch: str | None, planned: ConversionPlan, source: Source, *, private: bool
) -> tuple[Manifest, str, dict[str, Any] | None] | None:
    """Return manifest, commit and evaluation of the planned artifact in a repo; None if the repo does not hold it."""
    from hqconv.conversion.convert import why_not_current
    from hqconv.conversion.push import published_artifact

    published = published_artifact(repo, branch, private=private)
    if published is None or why_not_current(source, planned, None, published[0]):
        return None
    return published


def load(
    path: StrPath,
    *,
    layer: str,
    tp_rank: int = 0,
    ep_rank: int = 0,
    device: str = "cpu",
    check_digests: bool = True,
) -> dict[str, RankGemm]:
    """Load one MoE layer of one rank of a kernel artifact: `w13`, `w2` → Humming's LayerConfig and kernel tensors.

    path: the artifact. layer: its name, e.g. model.layers.0.mlp.experts. tp_rank,
    ep_rank: the rank. device: where the tensors go: auto, cpu, cuda or cuda:N. check_digests: compare the rank's file
    with the manifest's digest at its first reading in this process; the header is compared in any case.

    Returns tensors as in the file, experts of the rank first: `weight` int32 [E_local, …], `weight_scale`,
    where the schema has them `zero_point` and `weight_scale_2`, and `bias`; shapes and dtypes are Humming's for the
    target. Of static activations also `input_scale`, float32 [1], for all experts. Humming is not modified in
    this process. Raises RequestError where `path` is no kernel artifact or has no such layer or rank, or there is no
    such device, or memory is short; VerificationError where a file is damaged, or that of another rank, layer or
    target.
    """
    from hqconv.artifact.load import load_layer
    from hqconv.conversion.resources import explained_gpu_memory

    place = choose_device(device)
    with explained_gpu_memory(place, 'Free the GPU, or load with device="cpu".'):
        return load_layer(path, layer, tp_rank, ep_rank, place, check_digests=check_digests)


def to_kernel(
    weights: Mapping[str, torch.Tensor],
    *,
    tp_rank: int = 0,
    ep_rank: int = 0,
    model_config: Mapping[str, Any] | None = None,
    **options: Unpack[ConversionKeywords],
) -> dict[str, RankGemm]:
    """Convert one layer's experts, tensors in memory, to a rank's kernel tensors on the same device.

    For trainers that update a running server. weights: `w13` [E, 2I, H] (gate's rows first) and `w2` [E, H, I] in
    bfloat16, float16 or float32; or the layer's tensors under a checkpoint's names, in any format that `convert` reads.
    model_config: with a checkpoint's names, its config.json. tp_rank, ep_rank: the rank. options: as of `convert`; the
    target is the tensors' GPU if none is named. What needs more than a layer's weights is refused: the checkpoint
    layout, calibration, overrides, static scales of activations.

    Returns the tensors of `hqconv.load` from an artifact of the same weights and options, to the bit. Raises
    RequestError and InputError as `convert`. Uses device memory for the result and a batch of experts.
    """
    from hqconv.conversion.layer_to_kernel import layer_to_kernel

    return layer_to_kernel(weights, _parse(None, options), tp_rank, ep_rank, model_config)


def dequantize(path: StrPath, *, layer: str, check_digests: bool = True) -> dict[str, torch.Tensor]:
    """Return one layer's experts as float32, decoded from the kernel layout and joined from all ranks.

    path: the artifact. layer: its name, e.g. model.layers.0.mlp.experts, or that of a quantized linear layer beside the
    experts, e.g. model.layers.0.self_attn.q_proj, of which `weight` [N, K] is returned. check_digests:
    compare the layer's files with the manifest's digests at their first reading in this process.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError where `path` is no kernel artifact or has no such layer, or memory is short;
    VerificationError where a file is damaged, or that of another rank, layer or target.
    """
    from hqconv.artifact.load import dequantize as run

    return run(path, layer, check_digests=check_digests)
