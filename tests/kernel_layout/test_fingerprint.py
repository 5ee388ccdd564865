"""Fingerprints of kernel layouts: equal for versions that lay out alike, and for no two layouts that differ."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hqconv.errors import RequestError
from hqconv.humming_ops import runtime
from hqconv.kernel_layout import transform
from hqconv.kernel_layout.transform import layout_fingerprint, why_not
from hqconv.schemas.gpu_target import TARGETS, GpuTarget
from hqconv.schemas.input_schema import INPUT_PRESETS, KernelSpec
from hqconv.schemas.weight_schema import PRESETS, resolve_schema

SPEC = KernelSpec(resolve_schema("int4-g64-zp"), "bfloat16", GpuTarget(90))
SPECS = [
    spec
    for schema, inputs, dtype, sm in itertools.product(
        PRESETS.values(), INPUT_PRESETS.values(), ("bfloat16", "float16"), TARGETS
    )
    if why_not(spec := KernelSpec(schema, dtype, GpuTarget(sm, (13, 0)), inputs)) is None
]


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Any:
    layout_fingerprint.cache_clear()
    runtime.has_twins.cache_clear()
    yield
    layout_fingerprint.cache_clear()
    runtime.has_twins.cache_clear()


def test_every_layout_has_one() -> None:
    found = {spec: layout_fingerprint(spec) for spec in SPECS}
    assert len(found) > 400
    of_each = dict.fromkeys(found.values())
    assert len(of_each) > 40


def test_every_type_of_scale_has_one() -> None:
    spec = KernelSpec(resolve_schema("fp8-g32-e5m2"), "bfloat16", GpuTarget(90))
    assert len({layout_fingerprint(spec), layout_fingerprint(SPEC)}) == 2


def test_it_changes_with_any_move_of_a_word_or_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: Humming swaps two words of the weight, two scales, two zero points, or renames or reshapes a tensor."""
    recorded, real = layout_fingerprint(SPEC), transform.to_kernel
    for name in ("weight", "weight_scale", "zero_point"):

        def swapped(*args: Any, name: str = name) -> dict[str, torch.Tensor]:
            tensors = real(*args)
            flat = tensors[name].flatten().clone()
            flat[[5, 6]] = flat[[6, 5]]
            return {**tensors, name: flat.reshape(tensors[name].shape)}

        monkeypatch.setattr(transform, "to_kernel", swapped)
        layout_fingerprint.cache_clear()
        assert layout_fingerprint(SPEC) != recorded, name
    for changed in (lambda k, v: (f"{k}_", v), lambda k, v: (k, v.flatten())):
        monkeypatch.setattr(
            transform,
            "to_kernel",
            lambda *args, change=changed: dict(change(*one) for one in real(*args).items()),
        )
        layout_fingerprint.cache_clear()
        assert layout_fingerprint(SPEC) != recorded


@pytest.mark.parametrize(
    "dtype", [torch.float8_e8m0fnu, torch.float8_e5m2, torch.float16, torch.float32], ids=str
)
def test_scales_beside_each_other_differ(dtype: torch.dtype) -> None:
    found = transform.values((2, 7), dtype).float()
    assert len(found.unique()) == 14
    assert (found.isfinite() & (found > 0)).all()


def test_twins_do_not_stand_in_for_changed_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_COMPARED", ())
    with pytest.raises(RequestError, match="they have changed") as caught:
        transform.humming().ops.pack_weight(torch.zeros(1, 32, dtype=torch.int32), 4)
    assert "--device cuda" in caught.value.remedy
    form = transform.kernel_form(256, 512, SPEC)  # planning needs no kernel
    assert form.tensors


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in SPECS[::7]:
        assert layout_fingerprint(spec, "cuda") == layout_fingerprint(spec, "cpu"), str(spec)
    monkeypatch.setattr(runtime, "_COMPARED", ())
    monkeypatch.setattr(transform, "has_twins", lambda: False)
    cpu = layout_fingerprint(SPEC, "cuda")
    assert layout_fingerprint(SPEC) == cpu
