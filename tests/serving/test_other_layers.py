"""The config that stands for the source's: what vLLM's model classes ask of it, and what stays its own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here: `make test-vllm` runs these")

from tests.make import vllm_cpu  # isort: skip  - before vLLM  # noqa: F401
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

from hqconv.serving.vllm.config import HqconvConfig, SourceProxy

pytestmark = pytest.mark.vllm


def config(dense: QuantizationConfig | None = None) -> HqconvConfig:
    found = HqconvConfig({"format_version": 1})
    found.set_dense(dense)
    return found


def fp8() -> Fp8Config:
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )


def test_it_is_of_the_sources_class_and_of_its_own() -> None:
    """Also through copies, which vLLM makes, and pickles, which it sends to its workers."""
    own = config(fp8())
    for one in (own, copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert isinstance(one, Fp8Config)
        assert isinstance(one, HqconvConfig)
        assert isinstance(one, SourceProxy)
        assert isinstance(one, QuantizationConfig)
        assert not isinstance(one, ModelOptFp8Config)
        assert type(one) is HqconvConfig
        assert one.get_name() == "fp8"
        assert one.weight_block_size == [128, 128]


def test_without_quantized_other_layers_it_is_itself_alone() -> None:
    own = config()
    assert own.__class__ is HqconvConfig
    assert not isinstance(own, Fp8Config)
    assert own.get_name() == "hqconv"
    with pytest.raises(AttributeError, match="weight_block_size"):
        own.weight_block_size  # noqa: B018
    assert not hasattr(own, "use_deep_gemm")


def test_what_model_classes_set_reaches_the_source_and_its_own_state_does_not() -> None:
    dense: Any = fp8()
    own: Any = config(dense)
    own.activation_scheme = "static"
    own.packed_modules_mapping = {"qkv_proj": ["q_proj"]}
    assert (dense.activation_scheme, dense.packed_modules_mapping) == (
        "static",
        {"qkv_proj": ["q_proj"]},
    )
    own.unknown_there = 1
    assert not hasattr(dense, "unknown_there")
    dense.loader = dense.view = dense.renamed = "the source's"
    own.view, own.renamed = None, {}
    assert (dense.loader, dense.view, dense.renamed) == ("the source's",) * 3
    assert own.loader is not dense.loader


def test_packed_modules_that_vllm_set_before_are_the_sources_too() -> None:
    dense: Any = fp8()
    own = HqconvConfig({"format_version": 1})
    own.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    own.set_dense(dense)
    assert dense.packed_modules_mapping == {"gate_up_proj": ["gate_proj", "up_proj"]}
