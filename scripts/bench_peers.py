"""Other ways to the same result, for scripts/bench.py, and the proof that ours gives the bytes on record."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hqconv.schemas.weight_schema import resolve_schema

_LLM_COMPRESSOR = {"mxfp4": "MXFP4A16", "int4": "W4A16", "fp8-block": "FP8_BLOCK"}


def differences(devices: list[str], schemas: list[str]) -> list[str]:
    """Small conversions to these schemas, of every layout and grid, where they are not those on record.

    Under another torch than the record's the source has other random numbers; then the devices are held to each other.
    """
    from tests.make.artifacts import Record, conversions_of, make_source, record
    from tests.make.places import GOLDEN

    recorded = json.loads((GOLDEN / "artifacts.json").read_text())["cases"]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        source = make_source("plain", Path(folder) / "source")
        for name, options in conversions_of("plain"):
            if options["schema"] not in schemas:
                continue
            made = [record(source, Path(folder) / "out", {**options, "device": device}) for device in devices]
            wanted = Record(*recorded[f"plain/{name}"])
            if made[0].source == wanted.source:
                made.append(wanted)
            if len(set(made)) > 1:
                wrong.append(f"{name}: {made}")
    return wrong


def load_like_vllm(source: str, schema_name: str, device: str) -> dict[str, Any]:
    """What vLLM does on every start, by Humming's own calls: read, quantize each matrix, fill parameters, transform.

    One process for one rank, as vLLM: matrix by matrix from safetensors, on the device, and a layer's parameters are
    transformed when they are complete.
    """
    import torch
    from safetensors import safe_open

    import hqconv
    from hqconv.kernel_layout.rank_slices import gemm_tensors
    from hqconv.kernel_layout.runtime import resident
    from hqconv.kernel_layout.transform import humming_schema, to_kernel
    from hqconv.quantization.quantized import stack_tensors

    target = humming_schema(resolve_schema(schema_name))
    plan = hqconv.plan(source, schema=schema_name, target="sm90")
    where = torch.device(device)
    names = sorted(Path(source).glob("*.safetensors"))
    opened: list[Any] = [safe_open(name, "pt") for name in names]
    place = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    num_bytes = num_out = 0
    for planned in plan.layers:
        layer = planned.layer
        parameters = {}
        for role in layer.roles:
            packed = []
            for expert in range(layer.num_experts):
                name = layer.sources[expert][role]["weight"].name
                matrix = place[name].get_tensor(name).to(where)
                num_bytes += matrix.nbytes
                with resident(where):
                    packed.append(target.quant_tensor(matrix, target, matrix.dtype))
            parameters[role] = {key: one.to(where) for key, one in stack_tensors(packed).items()}
        cut = gemm_tensors(parameters, planned.encoding.schema, planned.slices[0])
        kernel = [to_kernel(form, cut[gemm]) for gemm, form in planned.forms.items()]
        num_out += sum(tensor.nbytes for tensors in kernel for tensor in tensors.values())
    return {"bytes_in": num_bytes, "bytes_out": num_out}


def compress_model_free(source: str, out: str, schema_name: str, device: str) -> dict[str, Any]:
    """llm-compressor's `model_free_ptq` to the scheme that is nearest to the schema."""
    from llmcompressor import model_free_ptq

    model_free_ptq(
        model_stub=source,
        save_directory=out,
        scheme=_LLM_COMPRESSOR[schema_name],
        ignore=["re:.*gate$", "lm_head", "re:.*self_attn.*", "re:.*norm.*", "re:.*embed.*"],
        max_workers=4,
        device=device,
    )
    return {"bytes_in": 0, "bytes_out": 0}
