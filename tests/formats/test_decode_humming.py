"""`decode` and `express` against Humming's own conversion of every source format it knows, bit for bit.

On the CPU with its ops' twins; marked `cuda`, through its public `convert_humming` on the GPU. Humming casts scales
to the parameter dtype: where that rounds, ours is not a direct conversion, and the rounded scales are compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hqconv.formats.source_format import why_not_direct
from hqconv.humming_ops.runtime import humming, resident
from hqconv.quantization.bit_codec import pack_along_rows
from hqconv.quantization.coded_matrix import CodedMatrix, scale_values
from hqconv.quantization.direct_tensors import _spread, express
from hqconv.schemas.weight_schema import WeightSchema
from tests.make.coded import Case, cases
from tests.make.tensors import same_bits

KNOWN = {one.name: one for one in cases() if one.humming is not None}
PARAM_DTYPES = {torch.float16: "float16"}


def param_dtype(one: Case) -> str:
    scale = next((t for name, t in one.tensors.items() if name in ("weight_scale", "scales")), None)
    return "bfloat16" if scale is None else PARAM_DTYPES.get(scale.dtype, "bfloat16")


def source_schema(one: Case) -> Any:
    config = dict(one.humming or {})
    module = humming().schema
    if config.get("quant_method") == "modelopt":
        return module.WEIGHT_SCHEMA_MAP["modelopt"].from_config(config)
    return module.BaseWeightSchema.from_config(config)


def loaded(one: Case, schema: Any, device: str) -> dict[str, torch.Tensor]:
    """The raw tensors under Humming's names, as its loader prepares them."""
    skipped = ("input_scale", "weight_shape")
    tensors = {one.humming_names.get(name, name): t for name, t in one.tensors.items() if name not in skipped}
    if "scale" in one.humming_names:
        tensors["weight"] = tensors["weight"].view(torch.uint8)
    if (one.humming or {})["quant_method"] in ("fp8", "modelopt"):
        tensors = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items()}
    tensors = {name: t.to(device) for name, t in tensors.items()}
    if (one.humming or {})["quant_method"] in ("bitnet", "quark"):
        tensors = {name: schema.process_loaded_weight(t, name) for name, t in tensors.items()}
    return tensors


def target_of(schema: Any) -> WeightSchema:
    """Humming's schema as ours."""
    scale_type = schema.weight_scale_type.value
    bs_dtype = None if schema.bs_dtype is None else str(schema.bs_dtype)
    return WeightSchema(
        name="theirs",
        b_dtype=str(schema.b_dtype),
        bs_dtype="float32" if scale_type in ("block", "tensor") else bs_dtype,
        weight_scale_type=scale_type,
        weight_scale_group_size=schema.weight_scale_group_size,
        weight_scale_group_size_n=schema.weight_scale_group_size_n,
        weight_scale_2_type=schema.weight_scale_2_type.value,
        has_zero_point=schema.has_zero_point,
        is_fp_zero_point=schema.is_fp_zero_point,
    )


def rounded(coded: CodedMatrix, target: WeightSchema, theirs: torch.Tensor) -> torch.Tensor:
    """Our scales spread over the target's groups and cast as Humming casts them."""
    rows, columns = (size or whole for size, whole in zip(target.scale_group(), coded.shape, strict=True))
    scale = scale_values(coded.scale)
    if coded.scale_2 is not None and target.weight_scale_2_type == "none":
        scale = scale * coded.scale_2.float()
    return _spread(scale, coded, rows, columns).to(theirs.dtype).reshape(theirs.shape)


def compare(one: Case, theirs: dict[str, torch.Tensor], target: WeightSchema, device: str) -> None:
    coded = one.coded(device)
    fmt, param = one.completed().format, param_dtype(one)
    why = why_not_direct(fmt, target, param)
    if not why:
        ours = express(coded, target, param)
        theirs = {name: tensor for name, tensor in theirs.items() if name != "bias"}
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []
        return
    assert coded.b_dtype == target.b_dtype, why
    assert same_bits(coded.packed, theirs["weight"])
    if "zero_point" in theirs and not target.is_fp_zero_point:
        assert coded.zero_point is not None
        assert same_bits(pack_along_rows(coded.zero_point, coded.num_bits), theirs["zero_point"])
    assert same_bits(rounded(coded, target, theirs["weight_scale"]), theirs["weight_scale"])


@pytest.mark.parametrize("name", KNOWN)
def test_humming_on_the_cpu(name: str) -> None:
    one = KNOWN[name]
    torch_dtype = getattr(torch, param_dtype(one))
    with resident(torch.device("cpu")):
        schema = source_schema(one)
        n, k = one.shape
        done, tensors = schema._convert_humming(loaded(one, schema, "cpu"), [n], [k], torch_dtype)
    compare(one, tensors, target_of(done), "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", KNOWN)
def test_humming_on_the_gpu(name: str) -> None:
    one = KNOWN[name]
    torch_dtype = getattr(torch, param_dtype(one))
    humming()
    schema = source_schema(one)
    n, k = one.shape
    done, tensors = schema.convert_humming(
        loaded(one, schema, "cuda"), [n], [k], torch_dtype, convert_symmetric_integer=False
    )
    compare(one, tensors, target_of(done), "cuda")
