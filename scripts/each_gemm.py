"""Stock vLLM with a schema for each GEMM: its own loading and processing, run once for each. For tests and checks.

vLLM 0.33 keeps a schema and a LayerConfig for each GEMM of a layer, but its Humming method sets both alike. Of the
checkpoint layout of two schemas (`w13`, `w2` in its quantization_config) this makes what an engine would serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GEMMS = ("w13", "w2")


@contextmanager
def each_gemm() -> Iterator[None]:
    """Context in which vLLM's Humming method takes a schema for each GEMM. In this process alone."""
    import torch
    from vllm.model_executor.layers.quantization import humming as stock

    method, config = stock.HummingMoEMethod, stock.HummingConfig
    create, schema_of, convert = (
        method.create_weights,
        config.get_layer_weight_schema,
        stock.convert_to_humming_moe_kernel_format,
    )
    both: dict[str, Any] = {}

    def get_layer_weight_schema(self: Any, words: dict[str, Any], prefix: str) -> Any:
        for gemm in GEMMS:
            both[gemm] = schema_of(self, {**words, **words[gemm]}, prefix)
        return both["w13"]

    def create_weights(self: Any, layer: Any, **words: Any) -> None:
        create(self, layer, **words)
        other: Any = torch.nn.Module()
        first = self.weight_schema
        self.weight_schema = both["w2"]
        create(self, other, **words)
        self.weight_schema = first
        layer.sublayer_configs["w2"] = other.sublayer_configs["w2"]
        for name in [name for name, _ in layer.named_parameters() if name.startswith("w2_")]:
            delattr(layer, name)
        for name, parameter in list(other.named_parameters()):
            if name.startswith("w2_"):
                setattr(layer, name, parameter)

    def convert_each(layer: Any, sublayer_configs: Any, weight_schema: Any, **words: Any) -> Any:
        found: dict[str, Any] = {}
        schemas: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        for gemm, sizes in sublayer_configs.items():
            found |= convert(
                layer=layer, sublayer_configs={gemm: sizes}, weight_schema=both[gemm], **words
            )
            schemas |= layer.weight_schemas
            inputs |= layer.input_schemas
        layer.weight_schemas, layer.input_schemas, layer.humming_configs = schemas, inputs, found
        return found

    method.create_weights, config.get_layer_weight_schema = create_weights, get_layer_weight_schema
    stock.convert_to_humming_moe_kernel_format = convert_each
    try:
        yield
    finally:
        method.create_weights, config.get_layer_weight_schema = create, schema_of
        stock.convert_to_humming_moe_kernel_format = convert
