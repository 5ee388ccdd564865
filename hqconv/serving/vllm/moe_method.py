"""One MoE layer in vLLM: parameters with the rank file's shapes, filled from it, and their kernel.

Every parameter but a static activation scale has the rank's experts as its first dimension, so EPLB can move experts
as slices. Nothing else depends on an expert: kernels, their settings and locks are those of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.humming import HummingMoEMethod
from vllm.model_executor.layers.quantization.utils.humming import (
    make_humming_moe_kernel,
    select_humming_moe_experts,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.model_executor.utils import is_weights_pre_processed
from vllm.utils import humming

from hqconv.artifact.tensor_filler import LoadTarget
from hqconv.errors import RequestError, VerificationError
from hqconv.kernel_layout.compatibility import load_layer_config
from hqconv.schemas.activation import Activation
from hqconv.schemas.artifact_names import GEMMS, is_input_scale, rank_file
from hqconv.schemas.tensors import torch_dtype
from hqconv.serving.artifact_view import (
    ArtifactLayer,
    ArtifactView,
    check_unchanged,
    open_rank_file,
)
from hqconv.serving.parameter_loader import ParameterLoader
from hqconv.serving.server_compatibility import (
    ServerLayer,
    check_dtype,
    check_fingerprint,
    check_flags,
    check_layer,
    check_rank_file,
    check_ranks,
    recut,
)
from hqconv.serving.vllm.translation import (
    agreed,
    check_inputs,
    check_redundant_experts,
    check_router,
)
from hqconv.serving.vllm.tuning import remembered

Callback = Callable[[], None]

_STAMP = "hqconv_sha256"  # buffer uint8 [32]: SHA-256 of the layer's rank file


class HqconvMoEMethod(HummingMoEMethod):  # type: ignore[misc]
    """Humming's MoE layer whose weights need no processing; `apply` is vLLM's."""

    moe_kernel: Any
    supports_pre_processed_weights = True  # of vLLM's weight cache, whose tensors are these

    def __init__(
        self,
        loader: ParameterLoader,
        view: ArtifactView,
        stored: ArtifactLayer,
        layer: RoutedExperts,
    ) -> None:
        """Check the layer against the artifact. Raises RequestError or VerificationError before loading any weight."""
        moe = layer.moe_config
        FusedMoEMethodBase.__init__(self, moe)  # Humming's own looks at a checkpoint's schema
        server_layer = _server_layer(layer)
        check_dtype(view, server_layer.dtype)
        check_ranks(view, server_layer)
        check_redundant_experts(view, server_layer)
        check_layer(view, stored, server_layer)
        check_router(view, stored, server_layer)
        check_inputs(view, stored)
        _set_activation(view, stored, layer)
        self.loader = loader
        self.view = view
        self.stored = stored
        self.layer = layer
        self.vllm_config = get_current_vllm_config_or_none()
        self.model = _model_of(self.vllm_config)
        ranks = moe.moe_parallel_config
        rank = ranks.tp_rank, ranks.ep_rank
        path = loader.path(view, rank_file(stored.name, *rank), **_downloading(self.vllm_config))
        self.file = open_rank_file(view, stored.name, *rank, path)
        self.humming_configs = {
            gemm: _layer_config(view, stored, gemm, document)
            for gemm, document in self.file.configs.items()
        }
        check_rank_file(view, self.file, server_layer, moe.num_local_experts)
        self.is_filled = False
        # vLLM's selection knows fewer weight types than the kernels, which are compiled from the stored layer config.
        self.experts_cls = select_humming_moe_experts(moe, kMxfp4Static, None)
        if self.experts_cls is None:
            raise RequestError(
                "There are no Humming experts in vLLM for this deployment.",
                where=f"{view.location.name}: {stored.name}",
                found=moe.moe_parallel_config,
                remedy="Leave VLLM_HUMMING_MOE_GEMM_TYPE unset; VLLM_LOGGING_LEVEL=DEBUG shows why each was left out.",
            )

    @property
    def supports_eplb(self) -> bool:
        """True: experts can move between ranks; what cannot is refused when the layer is created."""
        return True

    def create_weights(self, layer: RoutedExperts, **arguments: Any) -> None:
        """Register parameters of the shapes and dtypes of the rank's file, on the device that vLLM loads to.

        Raises RequestError if vLLM has padded the layer's sizes.
        """
        check_layer(
            self.view, self.stored, _server_layer(layer, hidden_size=arguments["hidden_size"])
        )
        layer.weight_schemas = {
            gemm: humming.HummingWeightSchema(
                **_given(self.stored.layer_spec.schema.of(gemm).humming_fields())
            )
            for gemm in GEMMS
        }
        inputs = humming.HummingInputSchema(
            **_given(self.stored.layer_spec.inputs.humming_fields())
        )
        layer.input_schemas = dict.fromkeys(GEMMS, inputs)
        layer.humming_configs = self.humming_configs
        for name, ref in self.file.tensors.items():
            data = torch.empty(ref.shape, dtype=torch_dtype(ref.dtype))
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        # With the parameters it goes to a weight cache, and from there to other servers.
        stamp = torch.tensor(list(bytes.fromhex(self.file.sha256)), dtype=torch.uint8)
        layer.register_buffer(_STAMP, stamp, persistent=False)
        self.loader.add(self)
        _watch_reloads(layer, self.file.tensors, self._check_reload, self._refill)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Fill the parameters from the rank's file, and build the kernel once.

        Parameters from a weight cache are left as they are. Raises VerificationError if they are of another file.
        """
        if not is_weights_pre_processed():
            self._fill()
        elif _stamp_of(layer) != self.file.sha256:
            raise VerificationError(
                "The weight cache holds other experts than those of this artifact.",
                where=f"{self.view.location.name}: {self.stored.name}",
                expected="the experts of this rank file, by its SHA-256",
                found="those of another file",
                remedy="Start the daemon again with this artifact: `vllm preload --model …`.",
            )
        if self.moe_kernel is not None:
            return
        tuning = self.loader.install_kernels(self.view)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        with remembered(tuning):
            self.moe_kernel = make_humming_moe_kernel(
                self.moe_quant_config,
                self.moe,
                self.experts_cls,
                routing_tables=layer._expert_routing_tables(),
            )

    def targets(self) -> list[LoadTarget]:
        """Current parameters, with their positions in the rank's file."""
        return [
            LoadTarget(ref, getattr(self.layer, name)) for name, ref in self.file.tensors.items()
        ]

    def _fill(self) -> None:
        if self.vllm_config is not None and self.vllm_config.load_config.load_format == "dummy":
            for target in self.targets():  # vLLM's dummy values are no codes and no scales
                target.as_bytes().zero_()
                if is_input_scale(target.ref.name):  # it is a divisor
                    target.tensor.detach().fill_(1)
            self.is_filled = True
        else:
            self.loader.fill(self)

    def _check_reload(self) -> None:
        """Refuse a reload in place, before vLLM loads anything, of what this layer was not created for.

        Raises RequestError for another model, another artifact in the same folder, and experts that may have moved.
        """
        if self.is_filled:
            if self.moe.moe_parallel_config.enable_eplb:
                raise RequestError(
                    "Experts that may have moved between ranks cannot be loaded again in place.",
                    where=f"{self.view.location.name}: {self.stored.name}",
                    expected="a server without --enable-eplb",
                    found="one that has --enable-eplb",
                    remedy="Start the server again; of sleep mode use level 1, which keeps the weights.",
                )
            if _model_of(self.vllm_config) != self.model:
                raise RequestError(
                    "The experts of another model cannot be loaded into this server.",
                    where=self.view.location.name,
                    found=_model_of(self.vllm_config),
                    remedy="Stop this server, whose weights are incomplete now, and start one with the other artifact.",
                )
            check_unchanged(self.view)

    def _refill(self) -> None:
        """Fill the parameters again after vLLM has reloaded the model in place, as after level 2 of sleep mode."""
        if self.is_filled:
            self._fill()


def _stamp_of(layer: RoutedExperts) -> str:
    """SHA-256 of the rank file that a layer's parameters were filled from, or "" if the weight cache has none."""
    stamp = getattr(layer, _STAMP)
    return "" if stamp.is_meta else bytes(stamp.tolist()).hex()


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _server_layer(layer: RoutedExperts, hidden_size: int | None = None) -> ServerLayer:
    """Facts of vLLM's layer for comparison, before or after vLLM has padded its sizes."""
    moe = layer.moe_config
    ranks = layer.moe_config.moe_parallel_config
    config = get_current_vllm_config_or_none()
    return ServerLayer(
        num_experts=moe.num_logical_experts,
        hidden_size=moe.hidden_dim if hidden_size is None else hidden_size,
        has_bias=moe.has_bias,
        gated=moe.is_act_and_mul,
        dtype=str(moe.in_dtype).removeprefix("torch."),
        tp=ranks.tp_size,
        ep=ranks.ep_size,
        placement=layer.expert_map_manager.placement_strategy,
        redundant=moe.num_experts - moe.num_logical_experts,
        router_weight_on_input=layer.apply_router_weight_on_input,
        is_elastic=config is not None and config.parallel_config.enable_elastic_ep,
    )


def _set_activation(view: ArtifactView, stored: ArtifactLayer, layer: RoutedExperts) -> None:
    """Set the layer's activation to the converted one. Raises RequestError if the model's activation differs."""
    moe = layer.moe_config
    is_situ = layer.activation is MoEActivation.SITU
    requested = Activation(
        layer.activation.value,
        layer.swiglu_limit,
        layer.swiglu_alpha,
        moe.activation_situ_beta if is_situ else layer.swiglu_beta,
        moe.activation_situ_linear_beta if is_situ else None,
    )
    found = agreed(
        f"{view.location.name}: {stored.name}", stored.activation, stored.gated, requested
    )
    layer.activation = moe.activation = MoEActivation(found.name)
    if is_situ:
        moe.activation_situ_beta = found.beta
        moe.activation_situ_linear_beta = found.linear_beta
    else:
        layer.swiglu_limit = found.limit
        layer.swiglu_alpha = found.alpha
        layer.swiglu_beta = found.beta


def _layer_config(
    view: ArtifactView, stored: ArtifactLayer, gemm: str, document: dict[str, Any]
) -> Any:
    """Humming's layer config of one GEMM. Raises RequestError if this Humming has another layout for it."""
    where = f"{view.location.name}: {stored.name}: {gemm}"
    entry = stored.gemms[gemm]
    spec = stored.layer_spec.of(gemm)
    check_fingerprint(where, view.humming_version, entry.fingerprint, spec, recut(view))
    try:
        config = load_layer_config(document)
        found = {flag: bool(getattr(config, flag)) for flag in entry.flags}
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        found = {f"{type(error).__name__}: {error}": True}
    check_flags(where, view.humming_version, entry.flags, found)
    return config


def _downloading(config: VllmConfig | None) -> dict[str, Any]:
    """Options for fetching rank files from the Hub: one by one if this process lacks some layers; and the cache."""
    if config is None:
        return {"alone": True, "cache_dir": None}
    alone = config.parallel_config.pipeline_parallel_size > 1
    return {"alone": alone, "cache_dir": config.load_config.download_dir}


def _watch_reloads(
    layer: RoutedExperts, names_of: Collection[str], before: Callback, after: Callback
) -> None:
    """Call `before` when vLLM takes a layer's parameters away to reload the model, `after` when all are back.

    vLLM reloads a model (after a deep sleep, say) by replacing every layer's parameters by ones on the meta device,
    loading tensors by their names, and putting the old parameters back where there were none: it calls no method of
    ours (model_loader/reload/layerwise.py). Without this such a server would go on with whatever its memory holds.
    """
    register = layer.register_parameter
    placed = set()

    def registering(name: str, param: torch.nn.Parameter | None) -> None:
        if name in names_of and param is not None:
            if param.is_meta:
                if name == next(iter(names_of)):
                    before()
            else:
                placed.add(name)
        register(name, param)
        if len(placed) == len(names_of):
            placed.clear()
            after()

    layer.register_parameter = registering


def _model_of(config: VllmConfig | None) -> str:
    """Folder or repo that vLLM loads; a reload can name another one."""
    return "" if config is None or config.model_config is None else str(config.model_config.model)
