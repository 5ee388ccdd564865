"""Python API of hqconv: the command line's commands as functions. See docs/api.md.

Each function imports what it works with: the command line needs the signatures of all of them at once.
"""

from __future__ import annotations

import inspect as inspect_module
import logging
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

from hqconv.errors import InputError, OutputError, RequestError, VerificationError, plural
from hqconv.schemas.options import (
    BUILTIN,
    CheckName,
    ConversionArguments,
    conversion_options,
    refuse_unknown_checks,
)

if TYPE_CHECKING:
    import torch

    from hqconv.artifact.load import RankGemm
    from hqconv.conversion.allocate import AllocationReport
    from hqconv.conversion.convert import ConversionReport
    from hqconv.conversion.push import PushReport
    from hqconv.conversion.stages import Progress
    from hqconv.planning.allocation import Candidates
    from hqconv.planning.plan import ConversionPlan
    from hqconv.planning.spec import ConversionOptions
    from hqconv.verification.result import VerificationReport

_LOG = logging.getLogger(__name__)


P = ParamSpec("P")
R = TypeVar("R")


_NUMBERS: dict[
    str, tuple[type, float, float]
] = {  # parameter → type, least and largest value, of each one in a list
    "threads": (int, 1, 4096),
    "jobs": (int, 1, 4096),
    "num_tokens": (int, 1, 2**40),
    "context_length": (int, 1, 2**30),
    "tp_rank": (int, 0, 2**20),
    "ep_rank": (int, 0, 2**20),
    "layers": (int, 0, 2**20),
    "sample": (int, 1, 2**20),
    "tokens": (int, 1, 999_999),
    "bits": (float, 0, 64),
    "max_error": (float, 0, 2**20),
    "max_kl": (float, 0, 2**20),
}


_FLAGS = {
    "num_tokens": "--tokens",
    "context_length": "--context",
    "tp_rank": "tp_rank",
    "ep_rank": "ep_rank",
}


def _checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the numbers that a public function is given, before it does anything. Raises RequestError."""
    parameters = inspect_module.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() & _NUMBERS.keys() & parameters.keys():
            if kwargs[name] is not None or parameters[name].default is not None:
                kwargs[name] = _number(name, kwargs[name])
        return function(*args, **kwargs)

    return checked


def _number(name: str, value: Any) -> Any:
    """Return a number of `_NUMBERS` as Python's own type, or several as a tuple. Raises RequestError."""
    kind, least, most = _NUMBERS[name]
    is_list, is_several = (
        name in ("layers", "tokens"),
        isinstance(value, Collection) and not isinstance(value, str | bytes),
    )
    numbers = []
    for one in value if is_list and is_several else (value,):
        try:
            number = operator.index(one) if kind is int else float(one)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if (
            is_list != is_several
            or isinstance(one, str | bytes | bool)
            or not least <= number <= most
        ):
            expected = f"{'a list, each ' * is_list}{'a whole' if kind is int else 'a'} number from {least} to {most}"
            found = (
                "a larger number" if isinstance(one, int) and abs(one) > most else repr(value)[:80]
            )
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise RequestError(
                "The number cannot be used.", where=flag, expected=expected, found=found
            )
        numbers.append(number)
    return tuple(numbers) if is_list else numbers[0]


def _with_options(function: Callable[P, R], without: Collection[str] = ()) -> Callable[P, R]:
    """Show each option of a conversion instead of `**options` in a function's signature, annotations and docstring.

    without: options that the function has no use for.
    """
    signature = inspect_module.signature(function)
    own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
    options = [option for option in conversion_options().values() if option.name not in without]
    shown = [
        inspect_module.Parameter(
            option.name,
            inspect_module.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=option.annotation,
        )
        for option in options
    ]
    positional = [
        parameter for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    parameters = [
        *positional,
        *shown,
        *(parameter for parameter in own if parameter not in positional),
    ]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    returned = function.__annotations__["return"]
    function.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": returned}
    lines = (f"{option.name}: {option.help}" for option in options)
    function.__doc__ = "\n    ".join([f"{function.__doc__}\n    Options:\n", *lines])
    return function


def _parse(config: str | Path | None, options: ConversionArguments) -> ConversionOptions:
    """Parse the options of a conversion, with a recipe's for those that are not given."""
    from hqconv.planning.spec import ConversionOptions
    from hqconv.schemas.recipe import with_recipe

    return ConversionOptions.parse(**cast(ConversionArguments, with_recipe(config, options)))


@_checked
@_with_options
def plan(
    src: str | Path,
    *,
    config: str | Path | None = None,
    revision: str | None = None,
    device: str = "auto",
    **options: Unpack[ConversionArguments],
) -> ConversionPlan:
    """Plan a conversion from headers and config alone: the tensors of every output file, and their places.

    src, config, revision, options: as of `convert`; of a Hub repo only headers are read. device: the GPU that an open
    `target` stands for. Raises the errors that `convert` raises before it writes.
    """
    from hqconv.conversion.option_values import choose_device, choose_target
    from hqconv.planning.plan import plan_conversion
    from hqconv.sources.opening import open_source, without_gc

    parsed, device = _parse(config, options), choose_device(device)
    with open_source(src, revision, is_lazy=True) as source, without_gc():
        return plan_conversion(
            parsed.calibrated(device), source, choose_target(parsed, source, device)
        )


@_checked
@_with_options
def convert(
    src: str | Path,
    out: str | Path | None = None,
    *,
    config: str | Path | None = None,
    revision: str | None = None,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    max_gpu_memory: str | int | None = None,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    update: bool = False,
    source_digests: bool = False,
    on_plan: Callable[[ConversionPlan, Path], None] | None = None,
    part: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    cache_limit: str | int | None = None,
    keep_source: bool = False,
    evaluate: str | Path | None = None,
    max_kl: float | None = None,
    **options: Unpack[ConversionArguments],
) -> ConversionReport:
    """Convert a model's experts: `src` to an artifact at `out`. See docs/api.md.

    src: a model folder, a Hub repo id (at `revision`), GGUF files, an artifact. out: None for `./<model>-<schema>…`.
    options: see below; schemas may also be a `WeightSchema` or an `InputSchema`. A schema is needed, here or in a
    recipe. config: a recipe, i.e. a TOML file or the name of a packaged one; options that are given and not None win.
    device: auto, cpu, cuda or cuda:N, as docs/api.md says. max_memory, max_gpu_memory: bytes, or text such as
    "4GiB". threads: None for all processors. resume: continue an interrupted conversion. overwrite: replace an
    artifact. update: leave an artifact of the same request and source, or resume it; replace any other.
    source_digests: hash the source's files, for the manifest. cache_limit: the most that is downloaded from the Hub at
    a time; None for four shards. keep_source: keep downloaded shards. on_plan: called with the plan and the output
    folder before anything is written. part: "1/4" for the first of four equal parts of the work, in a folder that all
    parts share; the last one finishes the artifact (`report.is_complete`). Parts run at the same time or not, and go on
    after a kill without `resume`. progress: called from worker threads. evaluate: a text that the finished artifact is
    evaluated on, as by `hqconv.evaluate`; None for what `calibrate` does not read of its own. max_kl: the evaluation
    must be possible; whether its mean divergence is larger stands in `report.over_max_kl`.
    Raises RequestError, InputError (also of a damaged artifact as a source), OutputError or NetworkError.
    """
    from hqconv.conversion import option_values as values
    from hqconv.conversion.output_folder import Part
    from hqconv.planning.plan import plan_conversion
    from hqconv.sources.opening import open_source, without_gc

    values.check_modes(resume=resume, overwrite=overwrite, update=update, part=part is not None)
    own_part = None if part is None else Part.parse(part)
    cache = values.cache_use(cache_limit, keep_source=keep_source)
    parsed = _parse(config, options)
    values.start_gpu(device, is_part=own_part is not None)  # beside all that comes before its use
    from hqconv.conversion.convert import (
        convert as run,
    )  # all libraries are loaded before the work begins
    from hqconv.evaluation.evaluate import held_out, with_evaluation

    resources = values.resources_of(
        device, max_memory, max_gpu_memory, threads, is_part=own_part is not None
    )
    with open_source(src, revision, is_lazy=True) as source:
        target = values.choose_target(parsed, source, resources.device_name)
        with without_gc():
            planned = plan_conversion(parsed.calibrated(resources.device_name), source, target)
        place = values.check_places(source.place, values.place_of(planned, out))
        _LOG.info("Planned %r for %s, target %s.", planned, place, target)
        text = None if evaluate is None else Path(evaluate)
        words = held_out(
            source, planned.spec.encoding.calibration, text, is_gated=max_kl is not None
        )
        if on_plan is not None:
            on_plan(planned, place)
        with_held_out = partial(
            with_evaluation, source=source, text=words, resources=resources, max_kl=max_kl
        )
        return run(
            source,
            planned,
            place,
            resources,
            resume=resume,
            overwrite=overwrite,
            update=update,
            part=own_part,
            progress=progress,
            digests=source_digests,
            cache=cache,
            held_out=words.batches(resources.device)
            if own_part is None
            else (),  # a part sees its own layers only
            finish=with_held_out,
        )


_NOT_ALLOCATED = ("schema", "layout", "overrides", "allow_unserved", "quantizer")


@_checked
@partial(_with_options, without=_NOT_ALLOCATED)
def allocate(
    src: str | Path,
    out: str | Path | None = None,
    *,
    size: str | int | None = None,
    bits: float | None = None,
    candidates: str | Sequence[str] | None = None,
    revision: str | None = None,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    max_gpu_memory: str | int | None = None,
    threads: int | None = None,
    on_plan: Callable[[Candidates, Path], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[ConversionArguments],
) -> AllocationReport:
    """Choose a schema for each GEMM of each MoE layer by measured losses within a budget, and write a recipe.

    The model runs once over the text `calibrate`, `builtin` if none is given. Every candidate is quantized as `convert`
    does with that text, which is a key of the recipe. out: the recipe, a TOML file for `convert(config=…)`; None for
    `./<model>-<budget>.toml`.
    An earlier recipe is replaced. size: bytes of the experts' tensors on all ranks, padding included, or text such as
    "120GB"; bits: the same as mean bits for each weight of the experts, to two decimals. One of the two is needed.
    candidates: schemas as of `convert`, as a list or with commas between; None for a list that fits the target.
    on_plan: called with the candidates and the recipe's path before the measurement.
    src, revision, options, device, max_memory, max_gpu_memory, threads, progress: as of `convert`.
    Raises RequestError also for a budget that no choice keeps, InputError, OutputError or NetworkError.
    """
    from hqconv.conversion import option_values as values
    from hqconv.planning.allocation import plan_candidates
    from hqconv.planning.spec import ConversionOptions
    from hqconv.schemas.weight_schema import PRESETS
    from hqconv.sources.opening import open_source, without_gc

    if unknown := options.keys() & set(_NOT_ALLOCATED):
        raise TypeError(f"unexpected keyword argument '{min(unknown)}'")
    names = candidates.split(",") if isinstance(candidates, str) else candidates
    names = None if names is None else [name.strip() for name in names]
    size_bytes = None if size is None else values.parse_bytes(size, "--size")
    options["calibrate"] = BUILTIN if options.get("calibrate") is None else options["calibrate"]
    schema: Any = next(iter(PRESETS.values()))
    parsed = ConversionOptions.parse(**cast(ConversionArguments, {**options, "schema": schema}))
    known, arguments = conversion_options(), dict[str, Any](options)
    given = {
        name: arguments[name]
        for name in known
        if arguments.get(name, known[name].default) != known[name].default
    }
    values.start_gpu(device)
    from hqconv.conversion.allocate import (
        run_allocation as run,
    )  # all libraries are loaded before the work begins

    resources = values.resources_of(device, max_memory, max_gpu_memory, threads)
    text = None if size is None else str(size)
    with open_source(src, revision) as source:
        with without_gc():
            target = values.choose_target(parsed, source, resources.device_name)
            planned = plan_candidates(parsed, names, source, target)
        name = f"{source.name}-{f'{bits:g}bits' if text is None else text.replace(' ', '')}.toml"
        place = values.check_places(source.place, Path(name if out is None else out))
        if on_plan is not None:
            on_plan(planned, place)
        return run(source, planned, (size_bytes, bits), given, place, resources, progress)


@_checked
def warm(
    out: str | Path,
    *,
    gpu: str | None = None,
    tp: int = 1,
    ep: int = 1,
    quantization: str | None = None,
    moe_backend: str | None = None,
    kernels: str | Path | None = None,
    jobs: int | None = None,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compile the kernels that vLLM requests of Humming when it serves a model. No GPU needed.

    out: an artifact in the kernel layout, whose kernels go to a folder beside it; or any checkpoint that vLLM serves
    with Humming by itself, a folder or a Hub repo, whose kernels go into Humming's cache (HUMMING_CACHE_DIR): vLLM must
    be installed, and be the server's installation. No weights are read. gpu: the server's: a name such as h200 or l40s,
    or a JSON file of facts; None: the one here. tp, ep, quantization, moe_backend: of the server of a checkpoint: TP
    ranks, EP ranks and vLLM's options of these names; an artifact has its own. kernels: the folder of an artifact's;
    None is `OUT-kernels`. jobs: compilers at once; None: as many as processors. announce: callback with a line about
    the next step. As vLLM does, it heeds VLLM_HUMMING_MOE_GEMM_TYPE, VLLM_HUMMING_USE_F16_ACCUM and
    VLLM_BATCH_INVARIANT. Kernels of the same compiler that are there stay.

    Returns a document: the folder, the GPU, and counts. Raises RequestError for other ranks than an artifact's, another
    GPU than its target's, a checkpoint that vLLM does not serve with Humming, or without a compiler; VerificationError
    of a damaged artifact; OutputError.
    """
    from hqconv.warm.compile_kernels import warm as run

    return run(
        out,
        gpu=gpu,
        tp=tp,
        ep=ep,
        quantization=quantization,
        moe_backend=moe_backend,
        kernels=kernels,
        jobs=jobs,
        announce=announce,
    )


@_checked
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
    update: bool = False,
) -> dict[str, Any]:
    """Describe a plan as a document, with the memory it needs and the obstacles at `out`; writes nothing.

    planned: the result of `plan`. The other parameters are those of `convert`. Raises RequestError if memory is short
    or the device is missing.
    """
    from hqconv.conversion.option_values import check_places, place_of, resources_of
    from hqconv.reports.documents import describe_plan as describe
    from hqconv.reports.documents import output_notes
    from hqconv.sources.opening import without_gc

    place, resources = (
        place_of(planned, out),
        resources_of(device, max_memory, max_gpu_memory, threads),
    )
    with without_gc():
        try:
            check_places(Path(planned.source.folder), place)
            notes = output_notes(place, planned, resume=resume, overwrite=overwrite or update)
        except OutputError as error:
            notes = [error.message()]
        document = describe(planned, resources)
    return {**document, "device": resources.device_name, "out": str(place), "notes": notes}


@_checked
def verify(
    out: str | Path,
    source: str | Path | None = None,
    *,
    checks: Sequence[CheckName] | None = None,
    layers: Collection[int] | None = None,
    tokens: Sequence[int] = (1, 17, 256),
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
    max_error: float | None = None,
    cache_limit: str | int | None = None,
    keep_source: bool = False,
    progress: Callable[[str, Progress], None] | None = None,
) -> VerificationReport:
    """Verify an artifact: its files, its weights, and the production kernel on them; against its `source`, if given.

    out: the artifact, a folder or a Hub repo (of which only what the checks read is downloaded). source: its
    source, as `src` of `convert`, with `revision`; None: only the artifact's own records, `revision` is the artifact's.
    checks: of files, weights and kernel; None: all that can run here. layers: the MoE layers to look at; None: all, for
    the kernel the first, the middle and the last. tokens: batch sizes for the kernel. device: auto, cpu, cuda or
    cuda:N; the kernel needs a GPU of the artifact's target. max_memory: "4GiB" or bytes, of the experts at work.
    threads: workers; None: all processors. max_error: the largest relative error that a projection may have, recorded
    or measured; larger ones are findings. cache_limit, keep_source: as of `convert`, for a source on the Hub, whose
    shards are fetched while others are checked. progress: called with `files` or `weights` and how far that check is.

    All faults of the artifact are in the report, also an unreliable manifest. Raises RequestError where `out` is no
    artifact or a check cannot run; opening the source raises RequestError, InputError or NetworkError.
    """
    from hqconv.conversion.option_values import cache_use, resources_of, start_gpu

    start_gpu(device)
    from hqconv.io.hub import is_repo_id, open_repo
    from hqconv.sources.opening import open_source, parse_source_name
    from hqconv.verification.verify import VerifyOptions
    from hqconv.verification.verify import verify as run

    resources, cache = (
        resources_of(device, max_memory, None, threads),
        cache_use(cache_limit, keep_source=keep_source),
    )
    options = VerifyOptions(
        checks=None if checks is None else tuple(checks),
        layers=None if layers is None else frozenset(layers),
        tokens=tuple(tokens),
        device=None if device == "auto" else resources.device,
        num_threads=resources.num_threads,
        max_memory_bytes=resources.max_memory_bytes,
        source=None if source is None else str(source),
        max_error=max_error,
        cache=cache,
        progress=progress,
    )
    out, of_out, _ = parse_source_name(str(out), revision if source is None else None)
    is_folder = not is_repo_id(out)
    if source is None and revision is not None and is_folder:
        raise RequestError(
            "A revision is of a source.",
            where="--revision",
            found=revision,
            remedy="Name the source, or leave the revision out.",
        )
    root, listing = (Path(out), None) if is_folder else open_repo(out, of_out)
    with (
        nullcontext(None)
        if source is None
        else open_source(source, revision, is_lazy=True) as opened
    ):
        return run(root, opened, options, listing)


@_checked
def check(
    checkpoint: str | Path,
    against: str | Path | None = None,
    *,
    layers: Collection[int] | None = None,
    sample: int | None = None,
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
    cache_limit: str | int | None = None,
    keep_source: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Check a published checkpoint, alone or against the one that it was made from; return a document (docs/check.md).

    checkpoint: as `src` of `convert`, at `revision`. against: the original in any form, `org/name@REVISION` of a repo.
    layers: the MoE layers to look at; None: all. sample: experts of each layer, evenly spread; None: all. On the Hub a
    sample is read by byte ranges. max_memory: "4GiB" or bytes, of the experts at work. threads: workers; None: all
    processors. cache_limit, keep_source: as of `convert`, for each of the two. progress: called with how far it is.

    `passed` is False if something is surely wrong (`damage`); what may be is in `notices`. A checkpoint that
    contradicts itself is damaged. Raises RequestError for a checkpoint that hqconv does not know, unknown layers, and
    an original of other sizes; InputError for an original that contradicts itself, and for files that the system does
    not let it read; NetworkError.
    """
    from hqconv.conversion.option_values import cache_use, resources_of
    from hqconv.sources.opening import open_source

    resources, cache = (
        resources_of("cpu", max_memory, None, threads),
        cache_use(cache_limit, keep_source=keep_source),
    )
    from hqconv.checkup.check import CheckOptions, broken_checkpoint, of_original, run_check

    options = CheckOptions(
        layers=None if layers is None else frozenset(layers),
        sample=sample,
        num_threads=resources.num_threads,
        max_memory_bytes=resources.max_memory_bytes,
        cache=cache,
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
        return run_check(source, original, options)


def inspect(path: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Describe a model folder, a Hub repo or an artifact as a document, from headers only. `kind` names which.

    path: as `src` of `convert`, or an unfinished conversion. revision: a branch, tag or commit of a Hub repo.

    Raises RequestError, InputError, VerificationError (of a damaged artifact) or NetworkError.
    """
    from hqconv.reports.documents import inspect as run
    from hqconv.sources.opening import without_gc

    with without_gc():
        return run(path, revision)


def push(
    out: str | Path,
    repo: str,
    *,
    private: bool = False,
    branch: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> PushReport:
    """Push an artifact to a repo of the Hub: files are uploaded first, then one commit replaces an older artifact.

    out: the artifact. repo: org/name, created if missing. private: create it as private. branch: None is the repo's
    main one. announce: called with a sentence before each upload. Files that the repo holds already are not sent again.

    Raises RequestError where `out` is no artifact or the Hub refuses, VerificationError where a file is not what the
    manifest lists, OutputError where files of others have its names or the artifact changes meanwhile, NetworkError.
    Nothing is published then: until the commit the branch stays as it is.
    """
    from hqconv.conversion.push import push as run

    _LOG.info("Push of %s to %s begins.", out, repo)
    pushed = run(Path(out), repo, branch, private=private, announce=announce)
    _LOG.info(
        "Push is complete: %s, %d bytes, commit %s.",
        plural(pushed.num_files, "file"),
        pushed.num_bytes,
        pushed.commit,
    )
    return pushed


@_checked
def evaluate(
    out: str | Path,
    source: str | Path,
    text: str | Path,
    *,
    num_tokens: int = 16384,
    context_length: int = 512,
    compute_dtype: str = "float32",
    device: str = "auto",
    max_memory: str | int = "4GiB",
    threads: int | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Evaluate an artifact: KL divergence and perplexity of its weights against the source's on a text.

    Both run in transformers, layer by layer: the weights of one layer are in memory at a time. Activations are not
    quantized. out: the artifact. source: the checkpoint that it was made from, as `src` of `convert`, at `revision`.
    text: a text file that calibration did not see. num_tokens: tokens of the text that are read. context_length:
    tokens of one sequence. compute_dtype: float32, bfloat16 or float16, of weights and hidden states. device: auto,
    cpu, cuda or cuda:N. max_memory: on the CPU, of hidden states, one layer and logits; on a GPU its free memory is the
    limit. threads: of the CPU.

    The document is written beside the artifact too, as evaluation.json, from where the report takes it; where that
    cannot be done, a warning says so.

    Returns a document: `kl` (`mean`, `standard_error`, `median`, `p90`, `p99`, `max`; nats per token), `perplexity`
    and `mean_nll` (each of `source` and `artifact`), `top1_agreement` (share of tokens with the same most likely
    prediction), the conditions, and `warnings`. Raises RequestError where transformers is missing or cannot run the
    model, the source is another one, or memory is short; VerificationError for a damaged artifact, InputError,
    NetworkError.
    """
    from hqconv.conversion.option_values import resources_of
    from hqconv.evaluation.evaluate import evaluate as run

    return run(
        Path(out),
        str(source),
        Path(text),
        num_tokens=num_tokens,
        context_length=context_length,
        compute_dtype=compute_dtype,
        resources=resources_of(device, max_memory, None, threads),
        revision=revision,
    )


@dataclass(frozen=True, repr=False)
class PublishReport:
    """The result of a publication.

    source: name and commit. commit: of the branch that holds the artifact; None if nothing was published. converted,
    verified, pushed: the reports of the steps that ran. over_max_error: projections above the error limit, the worst
    first. over_max_kl: the divergence is above its limit. was_published: the repo held the artifact of this request and
    source before, and no step ran.
    """

    source: dict[str, Any]
    repo: str
    branch: str | None
    commit: str | None
    manifest_sha256: str
    was_published: bool = False
    out: Path | None = None
    converted: ConversionReport | None = None
    verified: VerificationReport | None = None
    pushed: PushReport | None = None
    over_max_error: list[dict[str, Any]] = field(default_factory=list)
    over_max_kl: bool = False

    @property
    def passed(self) -> bool:
        """True if the repo holds the artifact, and nothing is above a limit."""
        return self.commit is not None and not self.over_max_error and not self.over_max_kl

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        steps = {"converted": self.converted, "verified": self.verified, "pushed": self.pushed}
        return {
            "kind": "publication",
            "source": self.source,
            "out": None if self.out is None else str(self.out),
            "repo": self.repo,
            "branch": self.branch,
            "commit": self.commit,
            "manifest_sha256": self.manifest_sha256,
            "was_published": self.was_published,
            "passed": self.passed,
            "over_max_error": self.over_max_error,
            "over_max_kl": self.over_max_kl,
            **{
                name: None if report is None else report.to_dict() for name, report in steps.items()
            },
        }

    def __repr__(self) -> str:
        state = (
            "published before"
            if self.was_published
            else "published"
            if self.passed
            else "not published"
        )
        return (
            f"PublishReport({self.source['name']!r}, {self.repo!r}, commit {self.commit}, {state})"
        )


@_checked
@_with_options
def publish(
    src: str | Path,
    repo: str,
    out: str | Path | None = None,
    *,
    config: str | Path | None = None,
    revision: str | None = None,
    private: bool = False,
    branch: str | None = None,
    checks: Sequence[CheckName] | None = None,
    max_error: float | None = None,
    device: str = "auto",
    max_memory: str | int = "4GiB",
    max_gpu_memory: str | int | None = None,
    threads: int | None = None,
    source_digests: bool = False,
    cache_limit: str | int | None = None,
    keep_source: bool = False,
    evaluate: str | Path | None = None,
    max_kl: float | None = None,
    on_plan: Callable[[ConversionPlan, Path], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    check_progress: Callable[[str, Progress], None] | None = None,
    announce: Callable[[str], None] | None = None,
    **options: Unpack[ConversionArguments],
) -> PublishReport:
    """Convert a model, verify the artifact against it, and push it: each step only if it is necessary.

    Nothing is converted if the repo holds the artifact of this request and source already. Else the artifact at `out`
    is updated (as `convert(update=True)`), verified and pushed; one that was there and has a finding is made again. An
    artifact with a finding, an error above `max_error` or a divergence above `max_kl` is not pushed, nor one that
    replaced the verified one meanwhile. An artifact that the repo holds already is not evaluated.
    After a kill at any moment the same call ends at the same commit.

    src, out, config, revision, options, device, max_memory, max_gpu_memory, threads, source_digests, cache_limit,
    keep_source, on_plan, progress, evaluate, max_kl: as of `convert`. checks, max_error: as of `verify`, whose progress
    is check_progress. repo, private, branch, announce: as of `push`.
    Raises what `convert`, `verify` and `push` raise.
    """
    from hqconv.artifact.error_summary import over_limit
    from hqconv.conversion.option_values import choose_device, choose_target
    from hqconv.conversion.push import check_same_artifact, published_manifest
    from hqconv.conversion.push import push as push_artifact
    from hqconv.conversion.update import why_not_current
    from hqconv.planning.plan import plan_conversion
    from hqconv.sources.opening import open_source, pinned_name

    refuse_unknown_checks(checks)
    resources: dict[str, Any] = {"device": device, "max_memory": max_memory, "threads": threads}
    resources |= {"cache_limit": cache_limit, "keep_source": keep_source}
    with open_source(src, revision, is_lazy=True) as source:
        # All steps read this commit.
        src, revision = pinned_name(str(src), revision, source)
        named = {"name": source.repo_id or source.name, "revision": source.revision}
        parsed, device = _parse(config, options), choose_device(device)
        planned = plan_conversion(
            parsed.calibrated(device), source, choose_target(parsed, source, device)
        )
        published = published_manifest(repo, branch, private=private)
        if published is not None and why_not_current(source, planned, None, published[0]) == "":
            manifest, commit = published
            over = [] if max_error is None else over_limit(manifest.errors(), max_error)
            return PublishReport(
                named,
                repo,
                branch,
                commit,
                manifest.sha256,
                was_published=True,
                over_max_error=over,
            )
    for is_again in (
        False,
        True,
    ):  # an artifact that was there may be damaged: then it is made again, once
        converted = convert(
            src,
            out,
            config=config,
            revision=revision,
            max_gpu_memory=max_gpu_memory,
            source_digests=source_digests,
            on_plan=on_plan,
            progress=progress,
            update=not is_again,
            overwrite=is_again,
            evaluate=evaluate,
            max_kl=max_kl,
            **resources,
            **options,
        )
        if is_again:
            converted = replace(
                converted, replaced_because="the artifact that was there has a finding"
            )
        over = [] if max_error is None else over_limit(converted.errors, max_error)
        report = PublishReport(
            named, repo, branch, None, converted.manifest_sha256, over_max_error=over
        )
        report = replace(
            report, out=converted.out, converted=converted, over_max_kl=converted.over_max_kl
        )
        if over or converted.over_max_kl:
            break
        more: dict[str, Any] = {
            "checks": checks,
            "max_error": max_error,
            "progress": check_progress,
        }
        verified = verify(converted.out, src, revision=revision, **more, **resources)
        report = replace(report, verified=verified)
        if not verified.passed:
            if converted.was_finished and verified.has_damage:
                continue
            break
        check_same_artifact(converted.out, converted.manifest_sha256, verified.manifest_sha256)
        try:
            pushed = push_artifact(
                converted.out,
                repo,
                branch,
                private=private,
                announce=announce,
                manifest_sha256=converted.manifest_sha256,
            )
        except VerificationError:  # of bytes that the chosen checks do not read
            if converted.was_finished:
                continue
            raise
        report = replace(report, pushed=pushed, commit=pushed.commit)
        break
    return report


@_checked
def load(
    path: str | Path,
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
    from hqconv.conversion.option_values import choose_device
    from hqconv.conversion.resources import explained_gpu_memory

    place = choose_device(device)
    with explained_gpu_memory(place, 'Free the GPU, or load with device="cpu".'):
        return load_layer(path, layer, tp_rank, ep_rank, place, check_digests=check_digests)


@_checked
@_with_options
def to_kernel(
    weights: Mapping[str, torch.Tensor],
    *,
    tp_rank: int = 0,
    ep_rank: int = 0,
    model_config: Mapping[str, Any] | None = None,
    **options: Unpack[ConversionArguments],
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


def dequantize(
    path: str | Path, *, layer: str, check_digests: bool = True
) -> dict[str, torch.Tensor]:
    """Return one layer's experts as float32, decoded from the kernel layout and joined from all ranks.

    path: the artifact. layer: its name, e.g. model.layers.0.mlp.experts. check_digests:
    compare the layer's files with the manifest's digests at their first reading in this process.

    Returns `w1` (gate, if there is one) and `w3` (up) [E, I, H], `w2` (down) [E, H, I], and `b1`, `b3`, `b2` where
    there are biases. Raises RequestError where `path` is no kernel artifact or has no such layer, or memory is short;
    VerificationError where a file is damaged, or that of another rank, layer or target.
    """
    from hqconv.artifact.load import dequantize as run

    return run(path, layer, check_digests=check_digests)
