"""The evaluation that ends a conversion: over a text that its calibration did not read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hqconv.artifact.model_card import read_evaluation
from hqconv.artifact.reader import Artifact
from hqconv.calibration.forward_pass import Stream
from hqconv.calibration.inputs import batches_of
from hqconv.calibration.transformers_model import (
    Text,
    folder_of,
    import_transformers,
    quiet_loading,
    read_rest,
    read_text,
)
from hqconv.conversion.convert import ConversionReport
from hqconv.conversion.resources import Resources
from hqconv.errors import HqconvError, InputError, NetworkError, RequestError, plural
from hqconv.evaluation.evaluate import compare_on_text
from hqconv.models.source_protocol import Source
from hqconv.planning.calibration import Calibration

_NUM_TOKENS = 8192  # at most
_LEAST_TOKENS = 512  # of the rest of a calibration's text
_CONTEXT_LENGTH = 512


@dataclass(frozen=True)
class HeldOut:
    """A text for the evaluation, or the reason why there is none. name: of its file."""

    name: str = ""
    tokens: Text | None = None
    warnings: tuple[str, ...] = ()

    def batches(self, device: torch.device) -> list[torch.Tensor]:
        """Return the token ids of each pass, [B, T]."""
        return [] if self.tokens is None else batches_of(self.tokens, _CONTEXT_LENGTH, device)


def held_out(
    source: Source, calibration: Calibration | None, text: Path | None, *, is_gated: bool
) -> HeldOut:
    """Return the text of the evaluation that ends a conversion: `text`, or what calibration did not read of its own.

    is_gated: the evaluation is needed, for a limit. Raises RequestError where a needed or named text cannot be had.
    """
    if text is None and calibration is None and not is_gated:
        return HeldOut()
    try:
        return _read(source, calibration, text)
    except RequestError as error:
        if is_gated or text is not None:
            raise
        return HeldOut(warnings=(f"Nothing was evaluated. {_on_one_line(error)}",))


def _read(source: Source, calibration: Calibration | None, text: Path | None) -> HeldOut:
    transformers = import_transformers("A model is evaluated")
    source.fetch(source.other_files)  # the tokenizer's among them
    place = str(source.place)
    with quiet_loading(transformers), folder_of(source) as folder:
        if text is not None:
            tokens = read_text(transformers, folder, [text], _NUM_TOKENS, "--evaluate", place)
            return HeldOut(text.name, tokens)
        if calibration is None:
            raise RequestError(
                "There is no text for an evaluation.",
                where="--max-kl",
                remedy="Name a text with --evaluate, or use --calibrate.",
            )
        tokens = read_rest(
            transformers,
            folder,
            calibration.files,
            calibration.begin_of_rest,
            _NUM_TOKENS,
            "--calibrate",
            place,
        )
    calibration.check_unchanged()
    if len(tokens.ids) < _LEAST_TOKENS:
        raise RequestError(
            "Nothing of the calibration's text was held out for an evaluation.",
            where=f"--calibrate {calibration.root}",
            expected=f"{_LEAST_TOKENS} tokens at least after those that calibration reads, without lines that it reads",
            found=plural(len(tokens.ids), "token"),
            remedy="Name a text with --evaluate, or use fewer --calibrate-tokens.",
        )
    return HeldOut(f"{calibration.name}, held out", tokens)


def with_evaluation(
    report: ConversionReport,
    reference: Stream | None,
    source: Source,
    text: HeldOut,
    resources: Resources,
    max_kl: float | None,
) -> ConversionReport:
    """Return the report of a finished artifact with its evaluation, which is written beside the artifact too.

    reference: the source's passes over the text, which the calibration has run through some layers.
    An artifact that was finished before is not evaluated again over the text of the evaluation beside it.
    max_kl: limit of the mean divergence; with one, RequestError, InputError or NetworkError is raised where the model
    cannot be evaluated, and without one this is a warning.
    """
    if text.tokens is None:
        return _with_warnings(report, text.warnings)
    digest = hashlib.sha256(text.tokens.raw).hexdigest()
    with Artifact(report.out, is_sealed=True) as artifact:
        evaluation = read_evaluation(report.out, artifact.manifest) if report.was_finished else None
        if evaluation is None or evaluation["text"]["sha256"] != digest:
            if resources.is_cuda:
                torch.cuda.empty_cache()
            try:
                evaluation = compare_on_text(
                    artifact,
                    source,
                    text.tokens,
                    text.name,
                    context_length=_CONTEXT_LENGTH,
                    compute_dtype="float32",
                    resources=resources,
                    reference=reference,
                )
            except (RequestError, InputError, NetworkError) as error:
                if max_kl is not None:
                    raise
                warning = (
                    f"The artifact is complete, but it was not evaluated. {_on_one_line(error)}"
                )
                return _with_warnings(report, [warning])
            report = _with_warnings(report, evaluation["warnings"])
    # NaN is above every limit
    is_over_limit = max_kl is not None and not evaluation["kl"]["mean"] <= max_kl
    return replace(report, evaluation=evaluation, over_max_kl=is_over_limit)


def _with_warnings(report: ConversionReport, warnings: Iterable[str]) -> ConversionReport:
    return replace(report, warnings=(*report.warnings, *warnings))


def _on_one_line(error: HqconvError) -> str:
    return "; ".join(line.strip() for line in error.message().splitlines())
