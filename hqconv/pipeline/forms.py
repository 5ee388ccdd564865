"""What a plan says of the layouts, held to Humming before anything is written."""

from __future__ import annotations

from importlib.metadata import version

from hqconv.backends.forms import planned_packed_form
from hqconv.backends.layout import is_as_planned, is_compatible, packed_form
from hqconv.errors import RequestError
from hqconv.planning.groups import PlannedBlock, gemm_shapes
from hqconv.planning.plan import Plan
from hqconv.planning.request import Request
from hqconv.schemas import artifact


def check_forms(plan: Plan) -> None:
    """Ask Humming whether it runs the schema, and lays out every block as planned.

    Raises RequestError where it does not: it is another Humming than the one that hqconv was made for.
    """
    request = plan.request
    if all(is_compatible(kind) for kind in request.kinds):
        wrong = next((block for block in plan.blocks if not _is_as_planned(block, request)), None)
        if wrong is None:
            return
        what, block = "Humming lays out its tensors in another way than this version of hqconv.", wrong.name
    else:
        what, block = "Humming has no kernel for this combination.", "all blocks"
    words = (
        f"{request.schema.describe()}; {request.inputs.describe()}; {request.param_dtype}, {request.target}"
    )
    raise RequestError(
        what,
        where=f"{block}, schema {request.schema.name} ({words})",
        found=f"humming-kernels {version('humming-kernels')}",
        remedy="Install hqconv again, with the version of humming-kernels that it names.",
    )


def _is_as_planned(planned: PlannedBlock, request: Request) -> bool:
    block = planned.block
    if request.layout == artifact.KERNEL:
        kind = request.kind_of(block.name)
        shapes = gemm_shapes(block, request.grid.tp, kind.schema)
        return all(
            is_as_planned(planned.forms[gemm], n, k, kind, block.has_bias) for gemm, (n, k) in shapes.items()
        )
    words = (request.schema, request.param_dtype, block.has_bias)
    facts = [(*block.shape(role), *words) for role in block.roles]
    return all(packed_form(*one) == planned_packed_form(*one) for one in facts)
