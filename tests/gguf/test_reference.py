"""Faults of what a conversion makes of GGUF files: verify works their tensors out for itself, and sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hqconv.gguf import experts, model, source
from hqconv.gguf.model import DerivedTensor, RowOrder
from tests.make.conversions import check, run
from tests.make.gguf_models import MODELS, recorded

Patch = pytest.MonkeyPatch


def row(architecture: str, **changes: Any) -> Callable[[Patch], None]:
    """Change a row of the converter's table."""
    changed = replace(model.ARCHITECTURES[architecture], **changes)
    return lambda patch: patch.setitem(model.ARCHITECTURES, architecture, changed)


def of_tensor(change: Callable[[DerivedTensor], DerivedTensor]) -> Callable[[Patch], None]:
    """Change every tensor that the converter derives."""

    def plant(patch: Patch) -> None:
        map_all = source.map_tensors

        def changed(*words: Any) -> Any:
            found, dropped = map_all(*words)
            return {name: change(one) for name, one in found.items()}, dropped

        patch.setattr(source, "map_tensors", changed)

    return plant


def cut(floats: Any, ref: Any) -> Any:
    """Cut float32 numbers to bfloat16, in place of rounding."""
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    return floats if ref.dtype == "F32" else (bits >> 16).astype(np.uint16)


def shifted(patch: Patch) -> None:
    """Norms that are stored with one more, as some of llama.cpp's converters do."""
    encode = model._encode
    patch.setattr(model, "_encode", lambda x, ref: encode(x + 1 if "norm" in ref.name else x, ref))


def unturned(patch: Patch) -> None:
    """Keys of MLA whose matrices are not transposed."""
    decode = model.dequantize
    shape = (32, 24)  # of a head's keys

    def changed(raw: Any, ggml_type: str) -> Any:
        floats = decode(raw, ggml_type)
        return floats.T.reshape(shape) if floats.shape == shape else floats

    patch.setattr(model, "dequantize", changed)


def exchanged(patch: Patch) -> None:
    """Norms of q under the name of k's."""
    map_all = source.map_tensors

    def changed(*words: Any) -> Any:
        found, dropped = map_all(*words)
        q, k = (f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk")
        found[q], found[k] = (
            replace(found[k], ref=found[q].ref),
            replace(found[q], ref=found[k].ref),
        )
        return found, dropped

    patch.setattr(source, "map_tensors", changed)


def lost(patch: Patch) -> None:
    """A tensor that is dropped as if nothing needed it."""
    map_all = source.map_tensors

    def changed(*words: Any) -> Any:
        found, dropped = map_all(*words)
        gone = found.pop("model.layers.0.self_attn.q_norm.weight")
        return found, {**dropped, gone.stored[0].name: model._NOT_NEEDED}

    patch.setattr(source, "map_tensors", changed)


def of_stacks(**changes: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(experts, "STACKS", {**experts.STACKS, **changes})


def heads_of_q(one: DerivedTensor) -> DerivedTensor:
    return replace(one, num_heads=4) if one.order is RowOrder.ROPE else one


def retyped(one: DerivedTensor) -> DerivedTensor:
    ref = one.ref
    return (
        replace(one, ref=ref._replace(dtype="BF16", num_bytes=ref.num_bytes // 2))
        if ref.dtype == "F32"
        else one
    )


def turned(one: DerivedTensor) -> DerivedTensor:
    return replace(one, stored=one.stored[::-1]) if len(one.stored) == 2 else one


FAULTS: dict[str, tuple[str, Callable[[Patch], None], str]] = {
    "rows in llama.cpp's order": (
        "mixtral",
        row("llama", is_permuted=False),
        "self_attn.q_proj.weight",
    ),
    "rows of granite in llama.cpp's order": (
        "granitemoe",
        row("granitemoe", is_permuted=False),
        "k_proj.weight",
    ),
    "rows in pairs where none are": (
        "qwen3_moe",
        row("qwen3moe", is_permuted=True),
        "self_attn.q_proj.weight",
    ),
    "rows by another number of heads": (
        "mixtral",
        of_tensor(heads_of_q),
        "self_attn.k_proj.weight",
    ),
    "halves in turn": ("granitemoeshared", of_tensor(turned), "shared_mlp.input_linear.weight"),
    "matrices not transposed": ("deepseek_v3", unturned, "self_attn.kv_b_proj.weight"),
    "another dtype": ("deepseek_v3", of_tensor(retyped), "e_score_correction_bias"),
    "a router in another dtype": (
        "minimax_m2",
        row("minimax-m2", float32=()),
        "block_sparse_moe.gate.weight",
    ),
    "numbers cut off": (
        "dots1",
        lambda patch: patch.setattr(model, "_encode", cut),
        "lm_head.weight",
    ),
    "norms with one more": ("mixtral", shifted, "model.norm.weight"),
    "norms exchanged": ("qwen3_moe", exchanged, "self_attn.q_norm.weight"),
    "a tensor lost": ("qwen3_moe", lost, "blk.0.attn_q_norm.weight"),
    "gate and up exchanged": (
        "qwen3_moe",
        of_stacks(ffn_gate_exps=("w3",), ffn_up_exps=("w1",)),
        "source_parts: w1",
    ),
}


def findings(path: Path, out: Path) -> list[str]:
    report = check(out, path, "files", device="cpu")
    return [f"{one.where}: {one.what}" for result in report.results for one in result.findings]


@pytest.mark.parametrize("case", MODELS)
def test_every_architecture_is_known(case: str, tmp_path: Path) -> None:
    path = recorded(case, tmp_path)
    run(path, tmp_path / "out", "int4-g32")
    assert findings(path, tmp_path / "out") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_conversion(fault: str, tmp_path: Path, monkeypatch: Patch) -> None:
    case, plant, where = FAULTS[fault]
    path = recorded(case, tmp_path)
    with (
        monkeypatch.context() as patch
    ):  # of the conversion and of verify, as in a released version
        plant(patch)
        run(path, tmp_path / "out", "int4-g32")
        found = findings(path, tmp_path / "out")
    assert any(where in one for one in found), found
