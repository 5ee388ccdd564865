"""Which kernels vLLM 0.33 asks Humming for when it serves a block, as source text. Needs no GPU.

It is Humming's own code that writes them, with its questions about the device answered for another one: nothing here
knows how a kernel is tuned. What is asked follows vLLM's `fused_moe/experts/fused_humming_moe.py`.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, ClassVar

from hqconv.errors import RequestError
from hqconv.schemas.activation import Activation
from hqconv.serving.vllm.activations import serving_activation
from hqconv.serving.warm.gpus import Gpu

INDEXED, CONTIGUOUS, MASKED = "indexed", "grouped_contiguous", "grouped_masked"
NO_DEVICE = -1  # torch and Humming take it for "leave the current device"

# vLLM 0.33, quantization/utils/humming/activation.py, to the letter: a kernel is found by its text.
_SILU = "a / (1.f + expf(-a))"
_GELU = "0.5f * a * (1.f + erff(a * 0.7071067811865476f))"
_GELU_TANH = """[](float a) {
    const float cubic = 0.044715f * a * a * a;
    const float inner = 0.7978845608028654f * (a + cubic);
    return 0.5f * a * (1.f + tanhf(inner));
}(a)"""
_RELU2 = "fmaxf(a, 0.f) * fmaxf(a, 0.f)"
_CLAMPED_SILU = """[](float a, float b) {{
    const float gate = fminf(a, {limit});
    const float up = fmaxf(fminf(b, {limit}), -{limit});
    const float activated_gate = gate / (1.f + expf(-{alpha} * gate));
    return activated_gate * (up + {beta});
}}(a, b)"""
_SITU = """[](float a, float b) {{
            const float gate = {beta} * tanhf(a / {beta});
            const float activated_gate = gate / (1.f + expf(-a));
            const float up = {up};
            return activated_gate * up;
        }}(a, b)"""
_SWIGLUSTEP = """[](float a, float b) {
            const float activated_gate = a / (1.f + expf(-a));
            const float gate = fminf(activated_gate, 7.f);
            const float up = fmaxf(fminf(b, 7.f), -7.f);
            return gate * up;
        }(a, b)"""
_GATED = {
    **dict.fromkeys(("silu", "swish"), f"({_SILU}) * b"),
    "gelu": f"({_GELU}) * b",
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), f"({_GELU_TANH}) * b"),
}
_UNARY = {
    **dict.fromkeys(("silu", "swish"), _SILU),
    "gelu": _GELU,
    **dict.fromkeys(("gelu_tanh", "gelu_pytorch_tanh", "gelu_new"), _GELU_TANH),
    "relu2": _RELU2,
}


@dataclass(frozen=True)
class KernelSource:
    """One kernel before compilation: its text, the template to instantiate, sm 90 as "90a", and how it is compiled.

    patch: Humming's last touch on the compiled file, given its path.
    """

    code: str
    expression: str
    architecture: str
    without_fast_math: bool
    patch: Callable[[str], None] = field(compare=False)

    @property
    def name(self) -> str:
        """SHA-256 over all that makes the kernel, but for the compiler and its headers."""
        return kernel_name(self.code, self.expression, self.architecture, self.without_fast_math)


def kernel_name(code: str, expression: str, architecture: str, without_fast_math: bool) -> str:
    """The name of a kernel's files: see `KernelSource.name`."""
    return sha256(json.dumps([code, expression, architecture, without_fast_math]).encode()).hexdigest()


@dataclass(frozen=True)
class ServerSettings:
    """How a server asks: `gemm_type` as Humming has it, and what vLLM's environment variables say."""

    gemm_type: str
    use_f16_accum: bool = False
    use_batch_invariant: bool = False

    @classmethod
    def as_vllm(cls, has_ep: bool) -> ServerSettings:
        """As vLLM with this environment asks, for an artifact with or without expert parallelism."""
        wanted = os.environ.get("VLLM_HUMMING_MOE_GEMM_TYPE", "auto").lower()
        meant = {"auto": CONTIGUOUS if has_ep else INDEXED, "grouped": CONTIGUOUS}.get(wanted, wanted)
        if meant not in (INDEXED, CONTIGUOUS, MASKED):
            what, known = "Humming has no such GEMM.", f"auto, {INDEXED}, grouped, {CONTIGUOUS} or {MASKED}"
            raise RequestError(what, where="VLLM_HUMMING_MOE_GEMM_TYPE", expected=known, found=wanted)
        flags = (os.environ.get(n, "0") for n in ("VLLM_HUMMING_USE_F16_ACCUM", "VLLM_BATCH_INVARIANT"))
        return cls(meant, *(flag not in ("", "0") for flag in flags))

    def to_dict(self) -> dict[str, Any]:
        """Humming's compute config, as vLLM writes it."""
        return {
            "use_batch_invariant": self.use_batch_invariant,
            "use_f16_accum": self.use_f16_accum,
            "gemm_type": self.gemm_type,
        }


def humming_activation(activation: Activation, gated: bool) -> dict[str, str] | None:
    """The activation as vLLM hands it to Humming, or None where it does not, or its text is not known here."""
    text, kind = (
        (_gated_text(activation), "binary_split") if gated else (_UNARY.get(activation.name), "unary")
    )
    return None if text is None else {"activation_type": kind, "activation_impl": text}


def _gated_text(activation: Activation) -> str | None:
    found = serving_activation(activation, gated=True)
    if found is None:
        return None
    number = {key: f"({value}f)" for key, value in found.numbers.items()}
    if found.name == "situ":
        linear = number.get("linear_beta")
        return _SITU.format(
            beta=number["beta"], up="b" if linear is None else f"{linear} * tanhf(b / {linear})"
        )
    if found.name == "swiglustep":
        return _SWIGLUSTEP
    if found.limit is not None:
        return _CLAMPED_SILU.format_map({"alpha": "(1.0f)", "beta": "(0.0f)", **number})
    return _GATED.get(activation.name)


@contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Answer Humming's questions about any device for `gpu`, in this whole process; what it remembers is forgotten."""
    device: Any = importlib.import_module("humming.device")
    facts, current = gpu.facts(), device.current_device
    saved = device._get_device_info_extension, current._value, dict(device.DeviceInfo._instances)
    device._get_device_info_extension = lambda: SimpleNamespace(_DeviceInfo=lambda index: facts)
    current._value = facts
    device.DeviceInfo._instances.clear()
    _forget_tuning()
    try:
        yield
    finally:
        device._get_device_info_extension, current._value, _ = saved
        device.DeviceInfo._instances.clear()
        device.DeviceInfo._instances.update(saved[2])
        _forget_tuning()


def _forget_tuning() -> None:
    """Humming keeps tuning by the device's number, which says nothing about whose it is here."""
    importlib.import_module("humming.tune")._get_heuristics_config.cache_clear()
    of_inputs = importlib.import_module("humming.tune.process_input")
    for function in (of_inputs._tuning_config_for_device, of_inputs._tuning_intervals_for_device):
        function.cache_clear()


def _recorder(kernel: Any, found: list[KernelSource]) -> Any:
    """Humming's class of kernels, but a kernel is noted in `found` and not compiled; nothing is remembered."""

    class Noted(kernel):  # type: ignore[misc]
        _instances: ClassVar[dict[Any, Any]] = {}
        _str2kernel_cache: ClassVar[dict[Any, Any]] = {}

        def prepare(self) -> None:
            words = self.sm_version_str, self.disable_fast_math, self.postprocess_cubin
            found.append(KernelSource(self.code, self.kernel_expr, *words))

        def register_kernel(self) -> None:
            self.kernel_id = 0

        @staticmethod
        def compile_many(specs: Iterable[Any], device: Any = None) -> list[Any]:
            return [(Noted if kind is Noted else _recorder(kind, found))(**words) for kind, words in specs]

    return Noted


def gemm_kernels(words: Mapping[str, Any], asking: ServerSettings) -> list[KernelSource]:
    """The GEMM kernels for a LayerConfig (as words), of every batch size. Inside `standing_in` only."""
    kernels = importlib.import_module("humming.kernel.humming")
    config, tuning = tuning_table(words, asking)
    found: list[KernelSource] = []
    recorder = _recorder(kernels.HummingKernel, found)
    recorder.prepare_kernels(config.to_str(), json.dumps(asking.to_dict()), json.dumps(tuning), NO_DEVICE)
    return found


def tuning_table(words: Mapping[str, Any], asking: ServerSettings) -> tuple[Any, Any]:
    """Humming's LayerConfig of words, and its tuning for every batch size. Inside `standing_in` only."""
    config = importlib.import_module("humming.config").LayerConfig(**words)
    tuning = importlib.import_module("humming.tune").get_heuristics_config(
        layer_config=config,
        use_f16_accum=asking.use_f16_accum,
        use_batch_invariant=asking.use_batch_invariant,
        gemm_type=asking.gemm_type,
        device=NO_DEVICE,
    )
    return config, tuning


def input_kernels(
    words: Mapping[str, Any],
    asking: ServerSettings,
    activation: Mapping[str, str] | None,
    top_k: int,
    rotation: int = 0,
) -> list[KernelSource]:
    """The kernels that prepare a GEMM's input. Inside `standing_in` only.

    words: the LayerConfig. activation: what goes before w2's GEMM; None for w13's, which has none. rotation: the block
    size that inputs are rotated in, 0 for none.
    """
    config = importlib.import_module("humming.config").LayerConfig(**words)
    mode = config.input_quant_mode
    scatters = activation is None and asking.gemm_type == CONTIGUOUS
    if activation is None and (
        _comes_quantized(config) or not (mode.should_quantize or scatters or rotation)
    ):
        return []
    layout = "scatter" if scatters else "grouped_mask" if asking.gemm_type == MASKED else "normal"
    options: dict[str, Any] = {
        **(activation or {}),
        "layout": layout,
        "scatter_width": top_k if scatters else 1,
        "hadamard_block_size": rotation or None,
    }
    if mode.should_quantize:
        options |= {
            "quant_mode": mode.value,
            "quant_dtype": config.a_dtype.dtype_str,
            "quant_group_size": config.input_scale_group_size or None,
            "group_scale_dtype": config.as_dtype.dtype_str,
        }
    problem = importlib.import_module("humming.config").ProcessInputProblemConfig(
        input_dtype=config.c_dtype, hidden_size=config.shape_k - config.pad_shape_k, **options
    )
    return _input_kernels(problem, config)


def _comes_quantized(config: Any) -> bool:
    """Whether vLLM quantizes a layer's tokens itself, before it sends them to other ranks (`utils/humming/moe.py`)."""
    words = config.a_dtype.dtype_str, config.input_quant_mode.value, config.input_scale_group_size
    return bool(words == ("float8e4m3", "dynamic_group", 128))


def _input_kernels(problem: Any, config: Any) -> list[KernelSource]:
    heuristics = importlib.import_module("humming.tune").get_heuristics_class(NO_DEVICE)
    tuning = importlib.import_module("humming.tune.process_input")
    found: list[KernelSource] = []
    recorder = _recorder(importlib.import_module("humming.kernel.process_input").ProcessInputKernel, found)
    for use_pdl in {heuristics.should_use_pdl_for_input(config, rows) for rows in (1, 1 << 20)}:
        intervals = tuning._tuning_intervals_for_device(problem, NO_DEVICE, use_pdl)
        recorder.prepare_kernels(problem, intervals, NO_DEVICE)
    return found
