"""Comparison of the error figures that the manifest records with the measured ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hqconv import __version__
from hqconv.artifact.manifest import ManifestLayer, ProjectionError
from hqconv.artifact.reader import Artifact
from hqconv.conversion.quant_error import requantized_counts, scale_changes
from hqconv.errors import number_text
from hqconv.formats.source_format import DIRECT_ROUNDED, LARGEST_CHANGE
from hqconv.models.moe_layer import MoeLayer
from hqconv.planning.layer_encoding import quantizer_version
from hqconv.quantization.quantize import ErrorSums
from hqconv.schemas import artifact_names as names
from hqconv.schemas.options import RTN
from hqconv.verification.figures import Figures, summarize
from hqconv.verification.result import CheckResult, compare_dicts

_DECODED = 2.0**-20  # of a weight: error of float32 products on top of its scale's change
_RELATIVE_TOLERANCE = 1e-9  # of error figures: sums of the same float64 terms in another order


def check_recorded(
    layer: MoeLayer,
    recorded: Mapping[str, ProjectionError],
    figures: Mapping[str, Sequence[Figures]],
    is_coded: bool,
    result: CheckResult,
) -> None:
    """Compare the manifest's error figures with the measured ones, if every expert was measured."""
    for role in sorted(recorded.keys() | figures.keys()):
        where = f"{names.MANIFEST}: {layer.name}: quantization_error: {role}"
        of_role, error = figures.get(role, []), recorded.get(role)
        if role not in figures or error is None:
            what = "The recorded errors are not those of the layer's projections."
            result.add(where, what, list(figures), error and error.to_dict())
        elif len(of_role) == layer.num_experts:
            each = [one.recorded_error() for one in of_role]
            # Experts that were kept unchanged have no error; the total is of the others.
            changed = [one for one in of_role if one.quantizer is None or not one.quantizer.is_exact]
            total = summarize(changed, as_recorded=True)["relative_error"] if changed else 0.0
            worst = error.worst_expert
            at_worst = each[worst] if worst is not None and 0 <= worst < len(each) else None
            _check_figure(f"{where}: relative_error", total, error.relative_error, result)
            _check_figure(f"{where}: worst_relative_error", max(each), error.worst_relative_error, result)
            _check_figure(f"{where}: worst_expert", max(each), at_worst, result)
            if worst is not None and at_worst is not None:
                _check_first(f"{where}: worst_expert", worst, of_role, result)
            _check_counts(where, error, [one.quantizer for one in of_role if one.quantizer], is_coded, result)


def _check_first(where: str, worst: int, of_role: Sequence[Figures], result: CheckResult) -> None:
    """Check that the worst expert is the first of those with the same sums, as the conversion measures them."""
    costs = [one.quantizer and (one.quantizer.error, one.quantizer.power) for one in of_role]
    if costs[worst] is not None and (first := costs.index(costs[worst])) != worst:
        result.add(where, "Of experts with the same error the first is the worst.", first, worst)


def check_search(artifact: Artifact, result: CheckResult) -> None:
    """Check that the search that chose the scales is this hqconv's, and so can be repeated."""
    quantizer = artifact.spec.encoding.quantizer
    if quantizer == RTN or artifact.search_version == quantizer_version(quantizer):
        return
    result.add(
        f"{names.MANIFEST}: quantizer_version",
        "The scales were searched for by another version of the search, which cannot be repeated here: "
        "verify against the source with the hqconv that made the artifact, or convert again.",
        f"{quantizer_version(quantizer)} (hqconv {__version__})",
        f"{artifact.search_version or 'none'} (hqconv {artifact.manifest.hqconv_version})",
    )


def check_changes(name: str, layer: ManifestLayer, param_dtype: str, result: CheckResult) -> None:
    """Check recorded scale changes: present only for rounded scales, and not larger than rounding causes."""
    is_rounded = layer.conversion == DIRECT_ROUNDED
    limit = LARGEST_CHANGE.get(param_dtype, 0.0)  # artifacts have no other dtype
    for role, error in layer.quantization_error.items():
        change, worst = error.largest_scale_change, error.worst_relative_error
        where = f"{names.MANIFEST}: {name}: quantization_error: {role}: largest_scale_change"
        if not is_rounded or change is None:
            if is_rounded or change is not None:
                what = "A change of scales is recorded where none is rounded, or none where they are."
                result.add(where, what, "a number" if is_rounded else "none", change)
            continue
        if not 0 <= change <= limit:
            what = "Scales moved further than rounding moves them."
            result.add(where, what, f"at most {limit:.4g} for {param_dtype}", number_text(change, limit))
        if worst is None or not worst <= change + _DECODED:
            what = "The recorded error is larger than the change of scales explains."
            found = worst if worst is None else number_text(worst, change)
            result.add(where, what, f"at most {change:.4g}", found)


def _check_counts(
    where: str, error: ProjectionError, costs: Sequence[ErrorSums], is_coded: bool, result: CheckResult
) -> None:
    """Check the manifest's counts of requantized matrices and exact scale groups, and the scale changes."""
    expected = (requantized_counts(costs) if is_coded else {}) | scale_changes(costs)
    known = {"relative_error", "worst_expert", "worst_relative_error"}
    found = {key: value for key, value in error.to_dict().items() if key not in known}
    compare_dicts(where, "The recorded count is not the counted one.", expected, found, result)


def _check_figure(where: str, expected: float | None, found: float | None, result: CheckResult) -> None:
    is_same = expected is not None and found is not None
    if not is_same or not math.isclose(expected or 0.0, found or 0.0, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-30):
        result.add(where, "The recorded error is not the measured one.", expected, found)
