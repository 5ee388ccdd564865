"""Names of MoE layers: from vLLM's prefix to the artifact's layer.

vLLM names a layer by the place it has in vLLM's own model, and an artifact names a layer by the module path of its
source. A model class's `hf_to_vllm_mapper` leads from the one to the other; what it leaves over is below. Read in
vLLM 0.33: files are below `vllm/model_executor/models` unless they begin with `vllm/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# Drafts that vLLM counts on after the last layer, and checkpoints from 0: vLLM's prefix, and the layer's name with what
# was left of the prefix.
_COUNTED_ON = (
    # vllm/models/deepseek_v4/nvidia/mtp.py and dspark.py; with the main model's mapper `model.mtp.0`
    (re.compile(r"model\.layers\.([0-9]+)\.(ffn\.experts)"), r"(?:model\.)?mtp\.[0-9]+\."),
    # vllm/models/qwen4_exp/nvidia/mtp.py
    (re.compile(r"mtp\.layers\.([0-9]+)\.(.+)"), r"mtp\.layers\.[0-9]+\."),
)


def find_layer(
    prefix: str, renamed: Mapping[str, str], indices: Mapping[str, int] | None = None
) -> str | None:
    """Find the artifact's layer whose experts belong into the layer that vLLM names `prefix`.

    `renamed` maps the names that vLLM's mappers gave to layers, or their own, to the names in the artifact; an empty
    one says that the name is two layers'. `indices` maps names to layer indices of the manifest, which count the drafts
    of `mtp.layers` on as vLLM does; without it no draft is found under another number.

    A name as it is comes first. Otherwise one of the spellings that vLLM 0.33 is known to use must be there, and only
    one. None where no layer has such a name, where two have, and for every name that no rule knows: an expert's
    weights have the right shape in every layer, so a wrong guess would load and answer nonsense. For the same reason
    no rule changes a layer's number, but for those drafts, and none leads from a draft to a layer of the model or
    back. Raises nothing.
    """
    if prefix in renamed:
        return renamed[prefix] or None
    found = {renamed[name] for name in _spellings(prefix) if name in renamed}
    found.update(_counted_on(prefix, renamed, indices or {}))
    return (found.pop() or None) if len(found) == 1 else None


def _spellings(prefix: str) -> Iterator[str]:
    """Yield other names than `prefix` that the artifact's layer may have."""
    if prefix.endswith(".experts"):
        # granitemoe.py, granitemoeshared.py, step3_text.py, step3p5.py: checkpoints have the stacks one module above.
        yield prefix.removesuffix(".experts")
    if prefix.endswith(".ffn"):
        # dbrx.py: DbrxMoE gives its own prefix to its experts.
        yield f"{prefix}.experts.mlp"
    if prefix.endswith(".mlp.experts"):
        # minimax_m2.py: the module is block_sparse_moe, the prefix says mlp.
        yield f"{prefix.removesuffix('.mlp.experts')}.block_sparse_moe.experts"
    if prefix.startswith("language_model.model.layers."):
        # aria.py: the mapper takes `model` away, the prefix has it.
        yield prefix.replace(".model.", ".", 1)
    if prefix.startswith("mtp."):
        # nemotron_h_mtp.py: in multimodal checkpoints drafts lie in language_model, and no mapper is applied.
        yield f"language_model.{prefix}"


def _counted_on(
    prefix: str, renamed: Mapping[str, str], indices: Mapping[str, int]
) -> Iterator[str]:
    """Yield layers of drafts with this layer's number in the manifest and a name that fits `prefix`."""
    for asked, place in _COUNTED_ON:
        match = asked.fullmatch(prefix)
        if match is None:
            continue
        name_of_layer = re.compile(place + re.escape(match[2]))
        for name, layer in renamed.items():
            if name_of_layer.fullmatch(name) and indices.get(layer) == int(match[1]):
                yield layer
