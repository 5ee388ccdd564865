"""Verification of an artifact: choice of checks, layers and devices, and the limit on relative errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hqconv.artifact.error_summary import over_limit
from hqconv.artifact.reader import Artifact
from hqconv.artifact.reference_predictions import checkpoint_digest, read_reference, reference_path
from hqconv.conversion.hub_prefetch import CachePolicy
from hqconv.conversion.resources import explained_gpu_memory
from hqconv.conversion.stages import Meter, Progress
from hqconv.errors import (
    HqconvError,
    NetworkError,
    OutputError,
    RequestError,
    VerificationError,
    number_text,
    plural,
)
from hqconv.io.file_access import sha256_of
from hqconv.io.hub import Listing, fetch_file
from hqconv.models.source_protocol import Source
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import CARD, CONFIG, MANIFEST, REFERENCE
from hqconv.schemas.input_schema import A16, LayerSpec
from hqconv.schemas.options import (
    CHECKS,
    GPTQ,
    SERVER,
    refuse_unknown_checks,
    refuse_unknown_layers,
)
from hqconv.schemas.untrusted_files import read_json
from hqconv.verification.files import check_files
from hqconv.verification.kernel import check_kernel, other_layout, warm_kernels
from hqconv.verification.result import ERRORS_OF_WEIGHTS, MAX_ERROR, CheckResult, VerificationReport
from hqconv.verification.server import ServerOptions, check_server
from hqconv.verification.tolerances import kind_of_inputs
from hqconv.verification.weights import check_weights, consistent_layers, layer_bytes

_LOG = logging.getLogger(__name__)


def check_error(artifact: Artifact, weights: CheckResult | None, limit: float) -> CheckResult:
    """Add one finding for each projection whose relative error is larger than `limit`.

    weights: the result of the weights check, if it ran: its errors against the source count as well, since an
    artifact's kernels may lose more than its manifest records.
    """
    result = CheckResult(MAX_ERROR)
    recorded = artifact.manifest.errors()
    measured = {} if weights is None else weights.measured
    result.notes.append(f"the manifest's errors of {plural(len(recorded), 'layer')}")
    result.notes += [ERRORS_OF_WEIGHTS] * (artifact.spec.encoding.quantizer == GPTQ)
    figures = [
        measures
        for layer in measured.values()
        for measures in layer.values()
        if isinstance(measures, Mapping)
    ]
    if any("relative_error" in measures for measures in figures):
        result.notes.append(
            f"and those measured against the source, of {plural(len(measured), 'layer')}"
        )
    for errors, kind in ((recorded, "recorded"), (measured, "measured")):
        for one in over_limit(errors, limit):
            error = one["relative_error"]
            found = number_text(error, limit) if isinstance(error, float) else error
            result.add(
                f"{one['block']}, {one['projection']}",
                f"The {kind} relative error is larger than --max-error.",
                f"at most {limit:g}",
                found,
            )
    return result


@dataclass(frozen=True)
class VerifyOptions:
    """Options of a verification. `checks`: None for all that can run here; `layers`: None for the defaults."""

    checks: tuple[str, ...] | None
    layers: frozenset[int] | None
    tokens: tuple[int, ...]
    device: torch.device | None  # None: a CUDA device, if there is one
    num_threads: int
    max_memory_bytes: int
    source: str | None  # name of the source in the report
    server: ServerOptions | None  # to check; with it `checks` are what runs beside it
    max_error: float | None  # of a projection; None for any
    cache: CachePolicy  # for the shards of a source on the Hub
    # called with the check's name, one call at a time
    progress: Callable[[str, Progress], None] | None


def verify(
    root: Path, source: Source | None, options: VerifyOptions, listing: Listing | None = None
) -> VerificationReport:
    """Run the checks on the artifact at `root`, against `source` if it is given.

    listing: of an artifact on the Hub, whose snapshot folder is `root`: files are downloaded when a check reads them.
    Raises RequestError for a check that was named and cannot run here, for unknown layers, and if
    `root` is no artifact, NetworkError and its like if the Hub fails; faults of the artifact are in the report
    instead.
    """
    _check_options(options)
    asked = _asked_checks(options)
    report = VerificationReport(root if listing is None else Path(listing.repo_id), options.source)
    report.commit = None if listing is None else listing.commit
    if asked == (SERVER,) and listing is None and not (root / MANIFEST).is_file():
        _timed(report, SERVER, partial(_server_of_checkpoint, root, options))
        return report
    try:
        opened = Artifact(root, listing)
    except VerificationError as error:  # no manifest that any check could rely on
        report.results = [_finding(CHECKS[0], error)]
        return report
    remedy = "Free the GPU, or use --device cpu, which leaves out the check of the kernel."
    with opened as artifact, explained_gpu_memory(options.device or "cuda", remedy):
        report.manifest_sha256 = artifact.manifest.sha256
        report.warnings = tuple(artifact.manifest.warnings or ())
        layers = _chosen_layers(artifact, options.layers)
        with ThreadPoolExecutor(1, "hqconv-prepare") as pool:
            # Kernels are compiled during the first checks.
            kernels = _begin_kernels(artifact, options, layers, pool) if "kernel" in asked else None
            runs = {
                "files": lambda: check_files(
                    artifact, source, options.num_threads, _meter("files", artifact, options)
                ),
                "weights": lambda: _weights(artifact, source, options),
                "kernel": lambda: _kernel(artifact, source, options, layers, kernels),
                SERVER: lambda: _server(artifact, options),
            }
            for check in CHECKS:
                if check in asked:
                    _timed(report, check, runs[check])
        # every check relies on the manifest
        if CHECKS[0] not in asked and artifact.manifest.alteration is not None:
            report.results[0].add(f"{MANIFEST}: digest", *artifact.manifest.alteration)
        found = _run(CHECKS[0], partial(_check_unchanged, artifact))
        report.results[0].findings += found.findings
        if options.max_error is not None:
            weights = next((result for result in report.results if result.name == "weights"), None)
            limit = options.max_error
            report.results.append(_run(MAX_ERROR, lambda: check_error(artifact, weights, limit)))
        return report


def _asked_checks(options: VerifyOptions) -> tuple[str, ...]:
    """Return the checks to run: those that are named, and the server's where a server is."""
    if options.server is not None:
        return (*(check for check in options.checks or () if check != SERVER), SERVER)
    if options.checks is None:
        return CHECKS[:-1]
    if SERVER in options.checks:
        raise RequestError(
            "The check of a server needs its address.",
            where="--checks server",
            remedy="Name it with --server http://host:port.",
        )
    return options.checks


def _timed(report: VerificationReport, check: str, run: Callable[[], CheckResult]) -> None:
    """Run a check, and add its result and its time to the report."""
    started = time.monotonic()
    _LOG.info("Check %s of %s begins.", check, report.root)
    report.results.append(_run(check, run))
    report.seconds[check] = time.monotonic() - started
    _LOG.info("%r in %.1f s.", report.results[-1], report.seconds[check])


def _server(artifact: Artifact, options: VerifyOptions) -> CheckResult:
    """Run the check of the server of an artifact."""
    assert options.server is not None
    path = artifact.root / REFERENCE
    listing = artifact.listing
    if listing is not None and REFERENCE in listing.sizes:
        path = fetch_file(listing.repo_id, listing.commit, REFERENCE)
    reference = read_reference(path, artifact.manifest.sha256)
    is_quantized = any(spec.inputs != A16 for spec in artifact.spec.kernel_specs)
    return check_server(reference, options.server, has_quantized_inputs=is_quantized)


def _server_of_checkpoint(root: Path, options: VerifyOptions) -> CheckResult:
    """Run the check of the server of a plain checkpoint; one that is quantized may have quantized activations."""
    assert options.server is not None
    path = reference_path(root)
    is_there = path.is_file() and (root / CONFIG).is_file()
    reference = read_reference(path, checkpoint_digest(root) if is_there else "")
    is_quantized = is_there and "quantization_config" in read_json(root / CONFIG)
    return check_server(reference, options.server, has_quantized_inputs=is_quantized)


def _check_unchanged(artifact: Artifact) -> CheckResult:
    """Find that another artifact lies in the folder now than when the checks began."""
    result = CheckResult(CHECKS[0])
    manifest = artifact.manifest
    if (found := sha256_of(manifest.path)) != manifest.sha256:
        result.add(
            MANIFEST,
            "The artifact was replaced while it was checked.",
            f"sha256 {manifest.sha256}",
            f"sha256 {found}",
        )
    return result


def _begin_kernels(
    artifact: Artifact, options: VerifyOptions, layers: list[str], pool: ThreadPoolExecutor
) -> Future[None] | None:
    """Begin to compile the kernels of the kernel check, if it will run."""
    with suppress(HqconvError, OSError):  # the check reports it
        device, _ = _kernel_device(artifact, options.device)
        if device is not None:
            return pool.submit(
                warm_kernels, artifact, _sample(artifact, layers, options), options.tokens, device
            )
    return None


def _meter(check: str, artifact: Artifact, options: VerifyOptions) -> Meter | None:
    """Meter for the bytes of the files that a check reads; None without a progress callback."""
    listener = options.progress
    if listener is None:
        return None
    listed = artifact.manifest.files.items()
    # which is not hashed
    sizes = {path: entry.size_bytes for path, entry in listed if path != CARD}
    if check == "weights":
        layers = consistent_layers(artifact, options.layers, CheckResult(check))
        num_bytes = sum(layer_bytes(artifact, layer) for layer in layers)
        return Meter(num_bytes, len(layers), partial(listener, check))
    return Meter(sum(sizes.values()), len(sizes), partial(listener, check))


def _sample(artifact: Artifact, layers: list[str], options: VerifyOptions) -> list[str]:
    """Default layers for the kernel check: the first, middle and last, and one of each kind."""
    if options.layers is not None or len(layers) <= 3:
        return layers
    chosen = {layers[0], layers[len(layers) // 2], layers[-1]}
    with suppress(VerificationError):  # the `files` check reports it
        firsts = {_kind_of(artifact, name): name for name in reversed(layers)}
        known = {_kind_of(artifact, name) for name in chosen}
        chosen.update(name for kind, name in firsts.items() if kind not in known)
    return [name for name in layers if name in chosen]


def _kind_of(artifact: Artifact, layer: str) -> tuple[LayerSpec, Activation]:
    return artifact.layer_spec_of(layer), artifact.activation_of(layer)


def _check_options(options: VerifyOptions) -> None:
    """Refuse unknown checks, and options that would check nothing and pass."""
    for option, values in (
        ("--checks", options.checks),
        ("--layers", options.layers),
        ("--tokens", options.tokens),
    ):
        if values is not None and not values:
            raise RequestError(
                "Nothing is asked for.",
                where=option,
                remedy="Leave the option out for its default.",
            )
    refuse_unknown_checks(options.checks)


def _run(name: str, run: Callable[[], CheckResult]) -> CheckResult:
    """Run a check; an error that stops it half way becomes a finding."""
    try:
        return run()
    except (RequestError, NetworkError, OutputError):  # the last two of the Hub and its cache
        raise
    except HqconvError as error:
        return _finding(name, error)
    except OSError as error:
        result = CheckResult(name)
        result.add(
            str(error.filename or ""), "A file cannot be read.", "", error.strerror or str(error)
        )
        return result


def _finding(name: str, error: HqconvError) -> CheckResult:
    result = CheckResult(name)
    result.add_error(error)
    return result


def _chosen_layers(artifact: Artifact, indices: Collection[int] | None) -> list[str]:
    """Names of the MoE layers with the given indices, in order; all for None."""
    if indices is None:
        return list(artifact.layers)
    of_layer: dict[int, list[str]] = {}
    for name, entry in artifact.layers.items():
        of_layer.setdefault(entry.layer, []).append(name)
    refuse_unknown_layers(indices, of_layer)
    return [name for index in sorted(indices) for name in of_layer[index]]


def _weights(artifact: Artifact, source: Source | None, options: VerifyOptions) -> CheckResult:
    """Run the `weights` check: on a GPU of any architecture, or by the CPU's own loops."""
    limits = (options.layers, options.num_threads, options.max_memory_bytes)
    meter = _meter("weights", artifact, options)
    device = options.device
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type != "cuda":
        device = None
    return check_weights(artifact, source, *limits, device, meter, options.cache)


def _kernel(
    artifact: Artifact,
    source: Source | None,
    options: VerifyOptions,
    layers: list[str],
    kernels: Future[None] | None,
) -> CheckResult:
    """Run the kernel check, once the kernels are compiled."""
    device, obstacle = _kernel_device(artifact, options.device)
    if device is None:
        if options.checks and "kernel" in options.checks:
            raise RequestError(
                "The kernel check cannot run here.", where="--checks kernel", found=obstacle
            )
        return CheckResult("kernel", skipped=obstacle)
    chosen = _sample(artifact, layers, options)
    if kernels is not None:
        kernels.exception()
    with torch.cuda.device(device):
        result = check_kernel(
            artifact, source, chosen, options.tokens, device, options.num_threads, options.cache
        )
    result.notes.append(
        f"{len(chosen)} of {plural(len(layers), 'layer')}, batches of {', '.join(map(str, options.tokens))} tokens"
    )
    return result


def _kernel_device(
    artifact: Artifact, wanted: torch.device | None
) -> tuple[torch.device | None, str]:
    """Device to run the kernel on, or None and the reason."""
    if not artifact.manifest.is_kernel:
        return None, "the checkpoint layout has no kernel tensors"
    if wanted is not None and wanted.type != "cuda":
        return None, f"it needs a CUDA device, and --device {wanted.type} was asked for"
    if not torch.cuda.is_available():
        return None, "there is no CUDA device here"
    device = wanted or torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    sm_version = artifact.spec.layer_spec.target.sm_version
    if major * 10 + minor != sm_version:
        return None, f"the artifact is for sm{sm_version}, this device is sm{major}{minor}"
    with suppress(VerificationError):  # the check itself reports it
        for kernel_spec in artifact.spec.kernel_specs:
            if kind_of_inputs(kernel_spec.inputs) is None:
                return None, f"there is no reference for {kernel_spec.inputs.a_dtype} activations"
        if obstacle := other_layout(artifact):
            return None, obstacle
        if not any(artifact.knows_activation(layer) for layer in artifact.layers):
            found = dict.fromkeys(
                artifact.activation_of(layer).describe() for layer in artifact.layers
            )
            return None, f"the experts' activation is known by name only: {', '.join(found)}"
    return device, ""
