"""Which block of an artifact a MoE layer of vLLM's is.

vLLM names a layer by the place it has in vLLM's own model, and an artifact names a block by the module path of its
source. A model class's `hf_to_vllm_mapper` leads from the one to the other; what it leaves over is below. Read in
vLLM 0.33: files are below `vllm/model_executor/models` unless they begin with `vllm/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# One number between dots, as in `layers.61.`; greedy, so the last one.
_NUMBERED = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<layer>0|[1-9][0-9]*)\.(?P<after>.+)", re.ASCII)


def find_block(prefix: str, renamed: Mapping[str, str], num_layers: int | None = None) -> str | None:
    """The block whose experts belong into the layer that vLLM calls `prefix`.

    `renamed` maps the names that vLLM's mappers gave to blocks, or their own, to the names in the artifact; an empty
    one says that the name is two blocks'. `num_layers` is `num_hidden_layers` of the artifact's own config.json,
    without which no draft layer is renumbered: vLLM changes that value in the configs of some drafts.

    A name as it is comes first. Otherwise one of the spellings that vLLM 0.33 is known to use must be there, and only
    one. None where no block has such a name, where two have, and for every name that no rule knows: an expert's
    weights have the right shape in every layer, so a wrong guess would load and answer nonsense. For the same reason
    no rule changes a layer's number, but for drafts that vLLM counts on after the last layer, and none leads from a
    draft to a layer of the model or back. Raises nothing.
    """
    if prefix in renamed:
        return renamed[prefix] or None
    found = {renamed[name] for name in _spellings(prefix, num_layers) if name in renamed}
    return (found.pop() or None) if len(found) == 1 else None


def _spellings(prefix: str, num_layers: int | None) -> Iterator[str]:
    """The names other than `prefix` that a block of this layer may have."""
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
    if num_layers is not None:
        yield from _draft_spellings(prefix, num_layers)


def _draft_spellings(prefix: str, num_layers: int) -> Iterator[str]:
    """Names of a draft layer that vLLM counts on after the last of `num_layers`, and checkpoints count from 0."""
    match = _NUMBERED.fullmatch(prefix)
    if match is None or int(match["layer"]) < num_layers:
        return
    place = int(match["layer"]) - num_layers
    if match["before"] == "model.layers" and match["after"] == "ffn.experts":
        # vllm/models/deepseek_v4/nvidia/mtp.py and dspark.py: `mtp.0` of the checkpoint, `model.mtp.0` if the main
        # model's mapper was there before.
        yield f"mtp.{place}.ffn.experts"
        yield f"model.mtp.{place}.ffn.experts"
    if match["before"] == "mtp.layers":
        # vllm/models/qwen4_exp/nvidia/mtp.py
        yield f"mtp.layers.{place}.{match['after']}"
