"""The evaluation that ends a conversion: over a text that its calibration did not read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hqconv.artifact.model_card import evaluation_in_card, write_evaluation
from hqconv.artifact.reader import Artifact
from hqconv.calibration.inputs import batches_of
from hqconv.calibration.streamed_model import Stream
from hqconv.calibration.transformers_model import (
    Text,
    folder_of,
    import_transformers,
    quiet_loading,
    read_text,
)
from hqconv.conversion.convert import ConversionReport
from hqconv.conversion.resources import Resources
from hqconv.errors import HqconvError, InputError, NetworkError, RequestError, plural
from hqconv.evaluation.evaluate import EvaluateOptions, check_text, compare_on_text
from hqconv.models.source_protocol import Source
from hqconv.planning.calibration import Calibration

_LOG = logging.getLogger(__name__)
_NUM_TOKENS = 8192  # at most
_LEAST_TOKENS = 512  # of the rest of a calibration's text
_CONTEXT_LENGTH = 512
_REMEDY = "Name a text with --evaluate, or use fewer --calibrate-tokens."


@dataclass(frozen=True)
class HeldOut:
    """A text for the evaluation. name: of its file. words: its tokens. nothing: why there are none, or "" without."""

    name: str = ""
    words: Text | None = None
    nothing: str = ""

    def batches(self, device: torch.device) -> list[torch.Tensor]:
        """Return the token ids of each pass, [B, T]."""
        return [] if self.words is None else batches_of(self.words, _CONTEXT_LENGTH, device)


def held_out(
    source: Source, calibration: Calibration | None, text: Path | None, *, is_gated: bool
) -> HeldOut:
    """Return the text of the evaluation that ends a conversion: `text`, or what calibration did not read of its own.

    is_gated: the evaluation is needed, for a limit. Raises RequestError where a needed or named text cannot be had.
    """
    if text is None and calibration is None:
        if is_gated:
            what, remedy = (
                "There is no text for an evaluation.",
                "Name a text with --evaluate, or use --calibrate.",
            )
            raise RequestError(what, where="--max-kl", remedy=remedy)
        return HeldOut()
    transformers = import_transformers("A model is evaluated")
    source.fetch(source.other_files)  # the tokenizer's among them
    with quiet_loading(transformers), folder_of(source) as folder:
        place = str(source.place)
        if text is not None:
            words = read_text(transformers, folder, text, _NUM_TOKENS, "--evaluate", place)
            check_text(words, f"--evaluate {text}")
            return HeldOut(text.name, words)
        assert calibration is not None
        assert calibration.path is not None
        try:
            words = read_text(
                transformers,
                folder,
                calibration.path,
                _NUM_TOKENS,
                "--calibrate",
                place,
                calibration.begin_of_rest,
            )
        except RequestError as error:
            if is_gated:
                raise
            return HeldOut(nothing=f"Nothing was evaluated. {_on_one_line(error)}")
    calibration.check_unchanged()
    if len(words.ids) >= _LEAST_TOKENS:
        return HeldOut(f"{calibration.name}, held out", words)
    what = "Nothing of the calibration's text was held out for an evaluation."
    expected = f"{_LEAST_TOKENS} tokens at least after those that calibration reads, without lines that it reads"
    found = plural(len(words.ids), "token")
    if is_gated:
        where = f"--calibrate {calibration.path}"
        raise RequestError(what, where=where, expected=expected, found=found, remedy=_REMEDY)
    return HeldOut(nothing=f"{what} Expected: {expected}; found: {found}. {_REMEDY}")


def with_evaluation(
    report: ConversionReport,
    reference: Stream | None,
    source: Source,
    text: HeldOut,
    resources: Resources,
    max_kl: float | None,
) -> ConversionReport:
    """Return the report of a finished artifact with its evaluation, which the model card gets too.

    reference: the source's passes over the text, which the calibration has run through some layers.
    An artifact that was finished before is not evaluated again over the text that its card names.
    max_kl: limit of the mean divergence; with one, RequestError, InputError or NetworkError is raised where the model
    cannot be evaluated, and without one this is a warning.
    """
    if text.words is None:
        return (
            report
            if not text.nothing
            else replace(report, warnings=(*report.warnings, text.nothing))
        )
    with Artifact(report.out, is_sealed=True) as artifact:
        if report.was_finished:
            known = evaluation_in_card(report.out, artifact.manifest)
            if known is not None and _conditions(known) == _conditions_of(text.words):
                return _judged(report, known, max_kl)
        if resources.is_cuda:
            torch.cuda.empty_cache()
        options = EvaluateOptions(
            num_tokens=_NUM_TOKENS,
            context_length=_CONTEXT_LENGTH,
            compute_dtype="float32",
            write_card=True,
            resources=resources,
            revision=source.revision,
            announce=_LOG.info,
        )
        try:
            document = compare_on_text(artifact, source, text.words, text.name, options, reference)
        except (RequestError, InputError, NetworkError) as error:
            if max_kl is not None:
                raise
            warning = f"The artifact is complete, but it was not evaluated. {_on_one_line(error)}"
            return replace(report, warnings=(*report.warnings, warning))
        document |= {"artifact": report.out.name}  # the card is published
        write_evaluation(report.out, artifact.manifest, document)
    return _judged(
        replace(report, warnings=(*report.warnings, *document["warnings"])), document, max_kl
    )


def _judged(
    report: ConversionReport, evaluation: dict[str, Any], max_kl: float | None
) -> ConversionReport:
    is_over = (
        max_kl is not None and not evaluation["kl"]["mean"] <= max_kl
    )  # NaN is above every limit
    return replace(report, evaluation=evaluation, over_max_kl=is_over)


def _on_one_line(error: HqconvError) -> str:
    return "; ".join(line.strip() for line in error.message().splitlines())


def _conditions(document: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        document["text"]["sha256"],
        document["num_tokens"],
        document["context_length"],
        document["compute_dtype"],
    )


def _conditions_of(words: Text) -> tuple[Any, ...]:
    return hashlib.sha256(words.raw).hexdigest(), len(words.ids), _CONTEXT_LENGTH, "float32"
