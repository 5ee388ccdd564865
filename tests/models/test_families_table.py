"""The rows of the families table: complete, unambiguous, and such as the mapping relies on.

What the rows say of real files is in tests/test_fused_families.py and tests/test_family_conversions.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hqconv.models.families import BY_MODEL_TYPE, FAMILIES, Family


def test_every_model_type_has_one_row() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types)) == len(BY_MODEL_TYPE)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


ROWS = [*FAMILIES, *(replace(row, stacks=row.more_stacks) for row in FAMILIES if row.more_stacks)]


@pytest.mark.parametrize("family", ROWS, ids=lambda family: family.name)
def test_row_is_well_formed(family: Family) -> None:
    assert family.modules
    assert len(set(family.modules)) == len(family.modules)
    for template in family.modules:
        assert template.count("{layer}") == 1
        path = template.format(layer=3)
        # where the layer is read from
        assert len(re.findall(r"(?:^|\.)(?:layers|blocks|mtp|mtp_layers|meta_mlp)\.3\.", path)) == 1
        # what experts.py takes for an expert tensor must cover the row's own names
        marked = re.search(r"(^|\.)experts(\.|$)", path) or (family.stacks and "moe" in path)
        assert bool(marked) != family.is_unmarked
    assert set(family.projections) in ({"w1", "w3", "w2"}, {"w3", "w2"})
    assert len(set(family.projections.values())) == len(family.projections)
    # one pattern tells a stack from an expert's projection: an expert's name begins with a number
    assert all(
        name.isidentifier()
        for name in (*family.projections.values(), *(s.name for s in family.stacks))
    )
    if not family.stacks:
        return
    assert sorted(role for stack in family.stacks for role in stack.roles) == sorted(
        family.projections
    )
    assert len({stack.name for stack in family.stacks}) == len(family.stacks)
    for stack in family.stacks:
        assert not stack.interleaved or len(stack.roles) > 1
        assert not stack.flat or len(stack.roles) == 1
