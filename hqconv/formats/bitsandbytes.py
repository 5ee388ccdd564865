"""bitsandbytes' 4-bit matrices (nf4, fp4): the method `bitsandbytes` and its encoding, decoded by that library itself.

Legend: N output rows, K input columns. An optional dependency: the extra `bitsandbytes`.
"""

from __future__ import annotations

import importlib
import json
import math
from typing import TYPE_CHECKING, Any

from hqconv.errors import RequestError
from hqconv.formats.config_reader import ConfigReader, Keys, TextConfig
from hqconv.formats.encoding import (
    Decoded,
    Encoding,
    MatrixHeaders,
    StoredMatrix,
    StoredTensor,
    register_encoding,
)
from hqconv.formats.quant_config import ModuleRule, always, quant_method, skipped_names
from hqconv.formats.source_format import ANY, SourceFormat

if TYPE_CHECKING:
    import torch

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


# Block size, second quantization and storage are in each matrix's quant_state, which is checked.
KEYS = Keys(
    "load_in_4bit _load_in_4bit load_in_8bit _load_in_8bit bnb_4bit_quant_type llm_int8_skip_modules "
    "bnb_4bit_use_double_quant bnb_4bit_quant_storage "
    "bnb_4bit_compute_dtype llm_int8_threshold llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
)


@quant_method("bitsandbytes", keys=KEYS)
def parse_bitsandbytes(config: ConfigReader, _text: TextConfig) -> list[ModuleRule]:
    """Parse bitsandbytes' 4-bit tables; the sizes of its blocks are in the checkpoint."""
    if not config.flag(config.first("load_in_4bit", "_load_in_4bit"), False):
        key = config.first("load_in_8bit", "_load_in_8bit", "load_in_4bit")
        raise config.unsupported(key, "load_in_4bit: true")
    kind = config.text("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    options = (("quant_type", kind),)
    table = SourceFormat(f"bitsandbytes {kind}", "bnb4", group_n=ANY, group_k=ANY, options=options)
    return [skipped_names(config, "llm_int8_skip_modules"), always(table)]


@register_encoding
class BitsAndBytes4Bit(Encoding):
    """uint8 weight with absmax, quant_map and quant_state; absmax may be quantized itself ("nested")."""

    name = "bnb4"
    part_names = ("weight.absmax", "weight.quant_map", *_STATES, *_NESTED)

    def stored_tensors(self, matrix: MatrixHeaders) -> list[StoredTensor]:
        size = math.ceil(matrix.n * matrix.k / 2)
        is_nested = any(name in matrix.headers for name in _NESTED)
        stored = [
            StoredTensor("weight", ("weight",), ("U8",), ((size, 1), (1, size), (size,))),
            StoredTensor("absmax", ("weight.absmax",), ("U8",) if is_nested else ("F32",), None),
            StoredTensor("quant_map", ("weight.quant_map",), ("F32",), ((16,),)),
            StoredTensor("quant_state", _STATES, ("U8",), None),
        ]
        if is_nested:
            stored.append(StoredTensor("nested_absmax", _NESTED[:1], ("F32",), None))
            stored.append(StoredTensor("nested_quant_map", _NESTED[1:], ("F32",), ((256,),)))
        return stored

    def decode(self, matrix: StoredMatrix) -> Decoded:
        """Decode to float32 [N, K] by bitsandbytes on the CPU.

        In float32 instead of the state's own dtype, so nothing is rounded to 16 bits. Raises InputError for a
        quant_state that cannot be read or contradicts the matrix or its other tensors, RequestError where bitsandbytes
        is not installed.
        """
        import torch

        try:
            functional: Any = importlib.import_module("bitsandbytes.functional")
        except ImportError as error:
            raise RequestError(
                "This source is quantized by bitsandbytes, which is not installed.",
                where=matrix.names.get("weight", ""),
                expected="the bitsandbytes package",
                found=error,
                remedy="Run: pip install 'bitsandbytes>=0.45'.",
            ) from error
        state = _read_state(matrix)
        _check_state(matrix, state)
        _check_tables(functional, state, matrix)
        tensors = {
            name: tensor.cpu()
            for name, tensor in matrix.tensors.items()
            if name not in ("weight", "bias", "quant_state")
        }
        quant_state = functional.QuantState.from_dict({**state, **tensors}, torch.device("cpu"))
        quant_state.dtype = torch.float32
        weight = matrix["weight"].cpu().contiguous().reshape(-1, 1)
        values: torch.Tensor = functional.dequantize_4bit(weight, quant_state).reshape(matrix.shape)
        if not bool(values.isfinite().all()):
            matrix.refuse("absmax", "A scale is NaN or infinite.", "finite weights", "NaN or Inf")
        return values.to(matrix["weight"].device)


def _check_tables(functional: Any, state: dict[str, Any], matrix: StoredMatrix) -> None:
    """Refuse stored tables that differ from the library's own, because its CPU decoder ignores stored tables."""
    tables = {"quant_map": functional.get_4bit_type(state["quant_type"], device="cpu")}
    if "nested_quant_map" in matrix:
        tables["nested_quant_map"] = functional.create_dynamic_map()
    for name, table in tables.items():
        found = matrix[name].cpu().float().flatten()
        if found.shape != table.shape or not bool((found == table.float()).all()):
            expected = f"the {state['quant_type']} table of bitsandbytes"
            matrix.refuse(name, "A code table is not the library's.", expected, "other numbers")


def _read_state(matrix: StoredMatrix) -> dict[str, Any]:
    """Read the JSON document that bitsandbytes keeps as bytes in `quant_state`."""
    data = bytes(matrix["quant_state"].cpu().flatten().tolist())
    keys = {"quant_type", "blocksize", "dtype", "shape"}
    if "nested_absmax" in matrix:
        keys |= {"nested_blocksize", "nested_dtype", "nested_offset"}
    what = "The quantization state cannot be read."
    expected = f"a JSON object of {sorted(keys)}"
    try:
        state = json.loads(data)
    except ValueError as error:
        matrix.refuse("quant_state", what, expected, error)
    if not isinstance(state, dict) or set(state) != keys:
        matrix.refuse("quant_state", what, expected, state)
    return state


def _check_state(matrix: StoredMatrix, state: dict[str, Any]) -> None:
    floats = ("bfloat16", "float16", "float32")
    num_blocks = -(-math.prod(matrix.shape) // _usable(matrix, state, "blocksize", _BLOCK_SIZES))
    _usable(matrix, state, "quant_type", (matrix.fmt.option("quant_type"),))
    _usable(matrix, state, "dtype", floats)
    _usable(matrix, state, "shape", (list(matrix.shape),))
    _check_count(matrix, "absmax", num_blocks)
    if "nested_absmax" in matrix:
        size = _usable(matrix, state, "nested_blocksize", _BLOCK_SIZES)
        _usable(matrix, state, "nested_dtype", floats)
        _check_count(matrix, "nested_absmax", -(-num_blocks // size))


def _usable(matrix: StoredMatrix, state: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    if state[key] not in allowed:
        matrix.refuse(
            "quant_state", f"The quantization state's {key} is not usable.", allowed, state[key]
        )
    return state[key]


def _check_count(matrix: StoredMatrix, part: str, num_blocks: int) -> None:
    found = matrix[part].numel()
    if found != num_blocks:
        matrix.refuse(
            part, "There must be one scale for every block.", f"{num_blocks} values", found
        )
