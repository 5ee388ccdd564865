"""What hqconv makes of a published model: from its headers, and of its scaled-down twin's bytes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import hqconv
from hqconv.checkup.findings import header_findings
from hqconv.checkup.matrices import CheckFinding
from hqconv.errors import HqconvError
from hqconv.formats.source_format import SourceFormat
from hqconv.models.expert_map import ExpertMap
from hqconv.planning.plan import ConversionPlan
from hqconv.sources.opening import open_source
from tests.make.published import DATA, Published, write_sparse
from tests.make.twins import Sizes, write_twin

_NUM_BLOCK_TYPES = 3  # named in a row; more would not fit


@dataclass
class Outcome:
    """Of one model. `refused`: what was said instead of a plan; `twin`: schema → whether it converted and verified."""

    plan: ConversionPlan | None = None
    refused: str = ""
    twin: dict[str, bool] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    damage: list[CheckFinding] = field(default_factory=list)  # in the headers, by `hqconv check`

    @property
    def experts(self) -> ExpertMap:
        """What was found in the headers."""
        assert self.plan is not None, self.refused
        return self.plan.experts

    def formats(self) -> list[str]:
        """The formats of all layers, in words."""
        return list(dict.fromkeys(_words(layer.format) for layer in self.experts.layers))

    def row(self, model: Published, folder: str) -> str:
        """A row of docs/models.md."""
        kind = str(model.config.get("model_type"))
        if self.plan is None:
            return f"| {model.name} | {kind} | | | | | refused: {self.refused} |"
        layers = self.experts.layers
        sizes = list(
            dict.fromkeys(
                f"{b.num_experts} of [{b.intermediate_size}, {b.hidden_size}]" for b in layers
            )
        )
        activations = list(dict.fromkeys(layer.activation.describe() for layer in layers))
        done = ", ".join(
            f"{schema} {'ok' if good else 'FAILED'}" for schema, good in self.twin.items()
        )
        cells = (
            model.name,
            kind,
            self.experts.family,
            f"{len(layers)} × {'; '.join(sizes[:_NUM_BLOCK_TYPES])}",
            "; ".join(self.formats()),
            ", ".join(activations[:_NUM_BLOCK_TYPES]),
            done,
        )
        return f"| {' | '.join(cells)} |"


def _words(source: SourceFormat) -> str:
    return source.describe().replace("|", "/")


def outcome_of(path: Path, model: Published, folder: Path, *, with_twin: bool = True) -> Outcome:
    """Plan a model from its headers, and convert and verify a twin: to int4, and as it is where the plan keeps it."""
    own = model.expect.get("source_schema") or model.expect.get("mixed")
    wanted = ["int4-g64", *(["source"] if own else [])]
    sparse = write_sparse(model, folder / "sparse")
    try:
        plan = hqconv.plan(sparse, schema=wanted[-1], target="sm90")
        with open_source(sparse) as source:
            damage = [one for one in header_findings(source, plan.experts) if one.is_damage]
    except HqconvError as error:
        return Outcome(refused=f"{error.what} {error.found}".replace("|", "/"))
    finally:
        shutil.rmtree(sparse)
    outcome = Outcome(plan, damage=damage)
    layers = outcome.experts.layers
    first = layers[0]
    is_small = path.parent == DATA / "families"
    sizes = (
        None
        if is_small
        else Sizes.of(first.num_experts, first.hidden_size, first.intermediate_size)
    )
    if with_twin:
        twin = write_twin(model, folder / "twin", sizes, tuple(layer.name for layer in layers))
        for schema in wanted:
            outcome.twin[schema] = _is_good(twin, folder / schema, schema, outcome.findings)
    return outcome


def _is_good(twin: Path, out: Path, schema: str, findings: list[str]) -> bool:
    """Whether it converts, for two ranks, and is what it should be."""
    hqconv.convert(twin, out, schema=schema, target="sm90", tp=2, threads=1)
    report = hqconv.verify(out, twin, checks=["files", "weights"], threads=1)
    findings += [f"{schema}: {f}" for result in report.results for f in result.findings]
    return report.passed
