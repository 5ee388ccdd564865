"""Activations between an expert's GEMMs as values: name, numbers, and the config keys of the numbers.

Formulas are in `calibration/activations`, and in vLLM. Of w13's output a is the gate, b
what is up; without a gate the function acts on b alone. f is an elementwise function (silu, gelu, …):

    f                f(a) * b
    f_clamp          f(min(a, limit)) * clamp(b, -limit, limit)
    f_bound          min(f(a), limit) * clamp(b, -limit, limit)
    f_shift          f(a) * (b + beta)
    swigluoai        min(a, limit) * sigmoid(alpha * min(a, limit)) * (clamp(b, -limit, limit) + beta)
    situ             beta * tanh(a / beta) * sigmoid(a) * (linear_beta * tanh(b / linear_beta), or b without one)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

ELEMENTWISE = (
    "silu",
    "swish",
    "gelu",
    "gelu_tanh",
    "gelu_pytorch_tanh",
    "gelu_new",
    "relu",
    "relu2",
)
LIMITED = ("_clamp", "_bound")
_LABEL = re.compile(r"(?P<name>\w+_(?:clamp|bound))(?P<limit>\d+(?:\.\d+)?)")
# The numbers without which there is no formula: by name, and by what follows an elementwise function.
_GATED = {"swigluoai": ("limit", "alpha", "beta"), "situ": ("beta",)}
_SUFFIXES = {"clamp": ("limit",), "bound": ("limit",), "shift": ("beta",)}


@dataclass(frozen=True)
class Activation:
    """An activation: its name, and the numbers of its formula."""

    name: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None

    @classmethod
    def of_label(cls, label: str) -> Activation:
        """Return the activation of a name alone: `silu_clamp10` has its limit, `swigluoai` alone is GPT-OSS's."""
        if label == SWIGLUOAI.name:
            return SWIGLUOAI
        found = _LABEL.fullmatch(label)
        return cls(label) if found is None else cls(found["name"], float(found["limit"]))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Activation:
        """Read the activation of a manifest's layer; older manifests have the label only.

        Raises ValueError for invalid numbers, or numbers that the label does not have.
        """
        label = document["activation"]
        numbers = document.get("activation_parameters")
        named = cls.of_label(label)
        if numbers is None:
            return named
        known = {field.name for field in fields(cls)} - {"name"}
        are_known = isinstance(numbers, dict) and known.issuperset(numbers)
        if not are_known or not all(
            type(n) in (int, float) and math.isfinite(n) for n in numbers.values()
        ):
            raise ValueError(f"activation_parameters: {numbers!r}")
        found = cls(named.name, **{key: float(number) for key, number in numbers.items()})
        if found.label != label:
            raise ValueError(f"activation_parameters: {numbers!r} of {label}")
        return found

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are set, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {key: number for key, number in found.items() if number is not None}

    @property
    def label(self) -> str:
        """The name, with the limit where it is part of the name."""
        is_limited = self.name.endswith(LIMITED) and self.limit is not None
        return f"{self.name}{_plain(self.limit or 0.0)}" if is_limited else self.name

    def describe(self, *notes: str) -> str:
        """Format for people: the label, and in brackets the numbers that it leaves out, and more notes."""
        is_said = Activation.of_label(self.label) == self
        numbers = (
            () if is_said else (f"{key} {_plain(number)}" for key, number in self.numbers.items())
        )
        inside = ", ".join((*numbers, *notes))
        return f"{self.label} ({inside})" if inside else self.label

    def is_known(self, gated: bool) -> bool:
        """Return whether hqconv knows its formula and has the numbers."""
        if self.name in ELEMENTWISE:
            return True
        function, _, suffix = self.name.rpartition("_")
        needed = _SUFFIXES.get(suffix) if function in ELEMENTWISE else _GATED.get(self.name)
        return gated and needed is not None and set(needed) <= self.numbers.keys()

    def to_dict(self, gated: bool) -> dict[str, Any]:
        """Return the manifest's keys of a layer: keys beyond the label only where they add information."""
        found: dict[str, Any] = {"activation": self.label}
        if self.numbers:
            found["activation_parameters"] = self.numbers
        return found if self.is_known(gated) else {**found, "activation_is_known": False}


def _plain(number: float) -> str:
    """Format all digits of a number, without an exponent and without `.0`."""
    return format(Decimal(repr(float(number))), "f").removesuffix(".0")


# GPT-OSS's own: https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py (swiglu)
SWIGLUOAI = Activation("swigluoai", 7.0, 1.702, 1.0)


@dataclass(frozen=True)
class Numbers:
    """Config keys of an activation's numbers.

    plain: the activation that has them, as the config or the family names it. given: what it is then, with the numbers
    that the model's code has or takes where the config has no such key. keys: number → config key, whose value is one
    number or a list with one per layer. any_value: numbers that may be 0 or less; of the others 0 is none, as null is.
    """

    plain: str
    given: Activation
    keys: Mapping[str, str]
    any_value: tuple[str, ...] = ()

    def with_numbers(self, numbers: Mapping[str, float | None]) -> Activation:
        """Return the activation of one layer; numbers that are None are left out."""
        found: dict[str, Any] = dict(numbers)
        changed = replace(self.given, **found)
        is_off = self.given.name.endswith(LIMITED) and changed.limit is None
        return Activation(self.plain) if is_off else changed


def _clamp(key: str, default: float | None = None) -> Numbers:
    return Numbers("silu", Activation("silu_clamp", default), {"limit": key})


_STEP = Numbers("silu", Activation("silu_bound"), {"limit": "swiglu_limits"})


def _oai(**more: str) -> Numbers:
    keys = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", **more}
    return Numbers("swigluoai", SWIGLUOAI, keys, any_value=("alpha", "beta"))


# model_type, or a family's name for all of its model types → the numbers. From transformers' classes of that name, and
# from vLLM's where those have none: deepseek_v41 (deepseek_v4's layer), exaone_moe, bailing_moe_v3 (bailing_hybrid's
# configs have its key), gigachat3_5 (of glm5_next's row), step5, kimi_k3, minimax_m3 (its beta) and moondream3.
NUMBERS = {
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_v41", "deepseek_v41_text", "glm5_next"),
        _clamp("swiglu_limit", 10.0),
    ),
    "exaone_moe": _clamp("swiglu_limits"),
    "bailing_hybrid": _clamp("expert_swiglu_limit_list"),
    "bailing_moe_v3": _clamp("expert_swiglu_limit_list"),
    "step3": _STEP,
    "step5": _STEP,
    "gpt_oss": _oai(),
    "openai_privacy_filter": _oai(),
    "minimax_m3": _oai(beta="swiglu_beta"),
    "moondream3": Numbers("gelu", Activation("gelu_shift", beta=1.0), {}),
    "kimi_linear": Numbers(
        "situ",
        Activation("situ"),
        {"beta": "activation_situ_beta", "linear_beta": "activation_situ_linear_beta"},
    ),
}
# Keys that change an activation wherever a model's code reads them; which code does, is not known of every model.
CHANGING_KEYS = (
    "swiglu_limit",
    "swiglu_limits",
    "expert_swiglu_limit_list",
    "swiglu_alpha",
    "swiglu_beta",
)

_CHANGE = re.compile(
    r"(?:^|_)(?:soft_?cap(?:s|ped|ping)?|limits?|clamp(?:s|ed|ing)?|alphas?)(?:_|$)"
)
# Parts of a model beside the function between an expert's GEMMs, such as final_logit_softcapping, log_scaling_alpha.
_ELSEWHERE = re.compile(
    r"(?:^|_)(?:logits?|outputs?|heads?|attn|attention|kv|qk|rope|rotary|positions?|log|length|tokens?|embed\w*|routers?|"
    r"routing|loss|aux|lora|adapter|init\w*|time|ssm|mamba|conv|norm|residual|vision|visual|audio|images?|videos?|"
    r"patch\w*|prompt|frames?|temp|temperature|grad\w*|optim\w*|dropout|factors?|len|shared?|dense)(?:_|$)"
)


def may_change(key: str) -> bool:
    """Return True if a config key of an unknown model may give its experts' activation a number: mlp_gate_softcap."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    return _CHANGE.search(snake) is not None and _ELSEWHERE.search(snake) is None
