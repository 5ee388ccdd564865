"""bitsandbytes' 4-bit matrices (nf4, fp4), decoded by that library itself.

Legend: N output rows, K input columns. An optional dependency: `pip install hqconv[bitsandbytes]`.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch

from hqconv.errors import RequestError
from hqconv.formats.decode_floats import Names, Parts, Shape
from hqconv.formats.source_format import SourceFormat
from hqconv.quantization.coded_matrix import refuse


def decode_bitsandbytes(fmt: SourceFormat, parts: Parts, shape: Shape, names: Names) -> torch.Tensor:
    """float32 [N, K] of a uint8 weight with absmax, quant_map and quant_state, nested or not.

    Decoded by bitsandbytes on the CPU, in float32 instead of the state's own dtype, so nothing is rounded to 16
    bits. Raises InputError for a quant_state that cannot be read or contradicts the matrix or its other tensors,
    RequestError where bitsandbytes is not installed.
    """
    try:
        functional: Any = importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise RequestError(
            "This source is quantized by bitsandbytes, which is not installed.",
            where=names.get("weight", ""),
            expected="the bitsandbytes package",
            found=error,
            remedy="Run: pip install 'hqconv[bitsandbytes]'.",
        ) from error
    device = parts["weight"].device
    state = _state(parts, names)
    _check_state(fmt, state, parts, shape, names)
    _check_tables(functional, state, parts, names)
    tensors = {name: parts[name].cpu() for name in parts if name not in ("weight", "bias", "quant_state")}
    quant_state = functional.QuantState.from_dict({**state, **tensors}, torch.device("cpu"))
    quant_state.dtype = torch.float32
    weight = parts["weight"].cpu().contiguous().reshape(-1, 1)
    values: torch.Tensor = functional.dequantize_4bit(weight, quant_state).reshape(shape)
    if not bool(values.isfinite().all()):
        refuse("A scale is NaN or infinite.", names.get("absmax", ""), "finite weights", "NaN or Inf")
    return values.to(device)


def _check_tables(functional: Any, state: dict[str, Any], parts: Parts, names: Names) -> None:
    """The stored tables are the library's own, which its CPU decoder takes whatever is stored."""
    tables = {"quant_map": functional.get_4bit_type(state["quant_type"], device="cpu")}
    if "nested_quant_map" in parts:
        tables["nested_quant_map"] = functional.create_dynamic_map()
    for name, table in tables.items():
        found = parts[name].cpu().float().flatten()
        if found.shape != table.shape or not bool((found == table.float()).all()):
            expected = f"the {state['quant_type']} table of bitsandbytes"
            refuse("A code table is not the library's.", names.get(name, ""), expected, "other numbers")


def _state(parts: Parts, names: Names) -> dict[str, Any]:
    """The JSON document that bitsandbytes keeps as bytes in `quant_state`."""
    where = names.get("quant_state", "")
    data = bytes(parts["quant_state"].cpu().flatten().tolist())
    try:
        state = json.loads(data)
    except ValueError as error:
        refuse("The quantization state cannot be read.", where, "a JSON document", error)
    keys = {"quant_type", "blocksize", "dtype", "shape"}
    if "nested_absmax" in parts:
        keys |= {"nested_blocksize", "nested_dtype", "nested_offset"}
    if not isinstance(state, dict) or set(state) != keys:
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        refuse("The quantization state is not complete.", where, f"the keys {sorted(keys)}", found)
    return state


def _check_state(fmt: SourceFormat, state: dict[str, Any], parts: Parts, shape: Shape, names: Names) -> None:
    where = names.get("quant_state", "")
    expectations = (
        ("quant_type", (fmt.option("quant_type"),) if fmt.option("quant_type") else ("nf4", "fp4")),
        ("blocksize", (32, 64, 128, 256, 512, 1024, 2048, 4096)),
        ("dtype", ("bfloat16", "float16", "float32")),
        ("shape", (list(shape),)),
    )
    for key, allowed in expectations:
        if state[key] not in allowed:
            refuse(f"The quantization state's {key} is not usable.", where, allowed, state[key])
    count = -(-shape[0] * shape[1] // state["blocksize"])
    if parts["absmax"].numel() != count:
        at = names.get("absmax", "")
        refuse(
            "There must be one scale for every block of weights.",
            at,
            f"{count} values",
            parts["absmax"].numel(),
        )
    if "nested_absmax" not in parts:
        return
    at, size = names.get("nested_absmax", ""), state["nested_blocksize"]
    if not isinstance(size, int) or size <= 0 or parts["nested_absmax"].numel() != -(-count // size):
        refuse("There is not one scale a block of scales.", at, f"ceil({count} / {size}) values", size)
    if state["nested_dtype"] not in ("float32", "bfloat16", "float16"):
        refuse(
            "The quantization state's nested_dtype is not usable.", where, "float32", state["nested_dtype"]
        )
