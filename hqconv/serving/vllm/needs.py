"""The names of vLLM that the plugin uses, and a search for them in the installed one. Imports no vLLM.

Whether an installed vLLM fits is decided by what it has, not by its version: the search reads the text of its modules,
since importing all of them takes time in every process of every server.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

METHOD = "hqconv"  # `quant_method` of config.json
_MOE, _QUANT = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.layers.quantization"
# Module → the names that are imported from it, and the attributes and arguments that its classes must have.
NEEDS: dict[str, tuple[str, ...]] = {
    "vllm.config": ("VllmConfig", "get_current_vllm_config_or_none"),
    "vllm.config.load": ("download_dir", "load_format"),
    "vllm.config.parallel": ("enable_elastic_ep", "pipeline_parallel_size", "tensor_parallel_size"),
    "vllm.platforms.interface": ("get_device_capability", "to_int"),
    "vllm.model_executor.layers.linear": ("LinearBase", "UnquantizedLinearMethod"),
    "vllm.model_executor.utils": ("is_weights_pre_processed",),
    "vllm.model_executor.model_loader.reload.layerwise": ("register_parameter",),
    "vllm.utils.humming": ("HummingInputSchema", "HummingWeightSchema", "get_heuristics_config"),
    _MOE: ("FusedMoEMethodBase", "RoutedExperts"),
    f"{_MOE}.activation": ("MoEActivation", "SITU", "SWIGLUOAI_UNINTERLEAVE", "SWIGLUSTEP"),
    f"{_MOE}.config": (
        *(
            "activation_situ_beta",
            "activation_situ_linear_beta",
            "has_bias",
            "hidden_dim",
            "in_dtype",
        ),
        *(
            "is_act_and_mul",
            "moe_parallel_config",
            "num_experts",
            "num_local_experts",
            "num_logical_experts",
        ),
        *("enable_eplb", "ep_rank", "ep_size", "tp_rank", "tp_size"),
    ),
    f"{_MOE}.expert_map_manager": ("placement_strategy",),
    f"{_MOE}.routed_experts": (
        *(
            "_expert_routing_tables",
            "apply_router_weight_on_input",
            "expert_map_manager",
            "supports_eplb",
        ),
        *("swiglu_alpha", "swiglu_beta", "swiglu_limit"),
    ),
    f"{_MOE}.unquantized_fused_moe_method": ("UnquantizedFusedMoEMethod",),
    _QUANT: ("get_quantization_config", "register_quantization_config"),
    f"{_QUANT}.base_config": (
        *(
            "QuantizationConfig",
            "QuantizeMethodBase",
            "apply_vllm_mapper",
            "get_cache_scale_mapper",
        ),
        *("maybe_update_config", "supports_pre_processed_weights"),
    ),
    f"{_QUANT}.humming": ("HummingMoEMethod", "get_fused_moe_quant_config"),
    f"{_QUANT}.utils.humming.moe": (
        "make_humming_moe_kernel",
        "routing_tables",
        "select_humming_moe_experts",
    ),
    f"{_QUANT}.utils.quant_utils": ("kMxfp4Static",),
}


def missing(text_of: Callable[[str], str | None] | None = None) -> Iterable[str]:
    """Yield the names that an installed vLLM lacks, as `module: name`, or a module's alone.

    text_of: a module's text, or None where there is no such module; by default the installed one's.
    """
    for module, names in NEEDS.items():
        text = (text_of or _installed)(module)
        if text is None:
            yield module
            continue
        yield from (f"{module}: {name}" for name in names if not re.search(rf"\b{name}\b", text))


def _installed(module: str) -> str | None:
    """Text of an installed module's file; only vLLM's root package is imported on the way."""
    root, *inside = module.split(".")
    found = importlib.util.find_spec(root)
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        path = Path(folder, *inside)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return None
