"""Refusals of experts whose inputs are rotated at run time: their kernels would multiply with inputs that are not.

A rotation that was fused into the weights before they were stored needs nothing at run time, and converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hqconv.errors import RequestError
from hqconv.formats.config_reader import ConfigReader

# Keys of config.json, beside quantization_config, under which tools keep a rotation. Source: `save_spinquant_config` of
# auto_round.algorithms.transforms.spinquant.serialize and `save_config` of its transforms.hadamard.apply.
_IN_CONFIG = ("spinquant_config", "rotation_config")
_REMEDY = "Convert the original checkpoint, or one whose rotations are fused into the weights."


def rotated(config: ConfigReader, key: str, expected: str) -> RequestError:
    """Return the error for a key that declares a rotation at run time."""
    return RequestError(
        "The checkpoint's inputs are rotated at run time, which the kernel does not do.",
        where=config.where(key),
        expected=expected,
        found=repr(config.values.get(key)),
        remedy=_REMEDY,
    )


def refuse_rotation(config: ConfigReader, *keys: str) -> None:
    """Raise RequestError if one of the keys holds anything but null, false or an empty value."""
    for key in keys:
        if config.values.get(key):
            raise rotated(config, key, "nothing: inputs that are not rotated")


def is_online_spinquant(values: Mapping[str, Any], *, online_r1: bool) -> bool:
    """Return True if SpinQuant's R1 (before gate and up) or R4 (before down) is applied to activations.

    online_r1: the default of `online_r1_rotation`. R2 is always fused; R3 is in the attention. A flag that is missing
    counts as set.
    """
    is_r1_online = values.get("online_r1_rotation")
    is_r1_online = online_r1 if is_r1_online is None else is_r1_online
    return bool(values.get("r4", True)) or bool(values.get("r1", True) and is_r1_online)


def refuse_spinquant(config: ConfigReader, key: str) -> None:
    """Raise RequestError for AutoRound's spinquant_config unless its rotations are all fused.

    Source: `preregister_spinquant_buffers` of auto_round.algorithms.transforms.spinquant.serialize.
    """
    if config.has(key):
        own = config.table(key)
        if own.values and (is_online_spinquant(own.values, online_r1=True) or own.values.get("r3")):
            raise rotated(config, key, "rotations that are fused: r3, r4 and online_r1_rotation false")


def refuse_rotated_model(text: Mapping[str, Any]) -> None:
    """Raise RequestError if config.json itself, outside of its quantization config, declares rotated inputs."""
    config = ConfigReader(text, "config.json")
    refuse_spinquant(config, _IN_CONFIG[0])
    refuse_rotation(config, _IN_CONFIG[1])
