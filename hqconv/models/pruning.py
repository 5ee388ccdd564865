"""Some experts of a checkpoint instead of all: its map, its config and its routers as if the others had been pruned.

Legend: E experts of the source, Z zero experts that a router scores after them, E' kept experts, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hqconv.errors import RequestError, first_few
from hqconv.formats.source_format import LAID_OUT
from hqconv.models.config_facts import config_number
from hqconv.models.expert_map import ExpertMap
from hqconv.models.families import BY_NAME, FAMILIES, Family
from hqconv.models.moe_layer import InputScales, KeptIndex, MoeLayer, TensorSlice
from hqconv.schemas.kept_experts import OPTION, KeptExperts, Selection
from hqconv.schemas.model_config import TEXT_CONFIG_KEYS, Config, text_config
from hqconv.schemas.tensors import TensorRef

# Names in the MoE module, from transformers and the Hub's checkpoints. A router's scores, [E + Z, H]:
ROUTERS = (
    *("gate.weight", "gate.wg.weight"),
    *("router.weight", "router.layer.weight", "router.gate.weight", "router.classifier.weight", "router.proj.weight"),
)
# Numbers for each expert, [E + Z] or [1, E + Z]: biases of scores, corrections for the choice, scales of outputs.
EXPERT_NUMBERS = (
    *("gate.bias", "gate.e_score_correction_bias", "gate.expert_bias", "e_score_correction_bias", "expert_bias"),
    *("router.bias", "router.e_score_correction_bias", "router.per_expert_scale", "router_bias"),
    *("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
    *("experts.e_score_correction_bias", "per_expert_scale"),
)
# Such numbers elsewhere in the decoder layer (kolibri1).
_IN_LAYER = ("moe.router.expert_bias",)
# The same whatever the number of experts: a scale of the router's inputs [H].
_INDEPENDENT = ("router.scale",)
_HASH_TABLE = "tid2eid"  # expert numbers by token
_OTHERS = ("shared_expert", "shared_experts", "share_expert", "shared_expert_gate", "shared_mlp")
_DENSE = ("mlp", "feed_forward", "ffn")  # where experts lie beside them, directly in a decoder layer

# Every key that holds the number of routed experts in some model's config, beside other spellings of the same number.
NUM_EXPERTS_KEYS = tuple(
    dict.fromkeys((*(key for row in FAMILIES for key in row.num_experts_keys), "num_routed_experts", "num_moe_experts"))
)
# Experts are chosen within the best groups: runs of experts of equal length.
_NUM_GROUPS = ("n_group", "num_expert_group", "n_expert_groups", "num_expert_groups")
_TOP_GROUPS = ("topk_group", "topk_groups", "n_limited_groups")
_SCORED_BY = 2  # experts whose scores are a group's score
_REMEDY = "Prune the checkpoint with its own tools, and convert the result."


@dataclass(frozen=True)
class Pruned:
    """A source with some of its experts.

    cut: tensors with an entry for each expert, of which the kept ones remain. They have no bytes of their own in a
    file: each gets a place behind the end of every file, `BEHIND` and then `APART` from the others, in this order.
    """

    experts: ExpertMap
    config: dict[str, Any]
    cut: tuple[CutTensor, ...]


class CutTensor(NamedTuple):
    """A tensor of the source, its kept entries along the first dimension that is not 1, and the tensor of these."""

    whole: TensorRef
    kept: KeptExperts
    ref: TensorRef


BEHIND = 1 << 60
APART = 1 << 40


def keep_experts(
    experts: ExpertMap, tensors: Mapping[str, TensorRef], config: Mapping[str, Any], selection: Selection
) -> Pruned:
    """Return the map, the config and the cut tensors of a source whose other experts are left out.

    Raises RequestError for a selection that the model cannot have, and for tensors or config values that may depend on
    the number of experts in a way that is not known here.
    """
    if experts.left:
        what = "Experts that are copied unchanged cannot be left out."
        raise RequestError(what, where=f"{OPTION}, {experts.left[0]}", remedy="Convert the original checkpoint.")
    of_layer = _checked(experts, selection)
    count, number = _counts(experts, of_layer)
    text, family = text_config(config), BY_NAME[experts.family]
    new_config = _config(config, text, family, of_layer)
    _check_top_k(experts, number)
    zeros = config_number(text, family.zero_experts_keys, 0)
    num_scores = count + (0 if zeros is None else zeros[1])
    rows: dict[str, KeptExperts] = {}
    for layer in experts.layers:
        kept = of_layer[layer.name]
        scored = KeptExperts((*kept.experts, *range(count, num_scores)), num_scores)
        rows |= dict.fromkeys(router_tensors(layer, experts.copied, tensors, num_scores), scored)
        rows |= dict.fromkeys(_stacked_scales(layer), kept)
    cut = tuple(_cut(tensors[name], kept, place) for place, (name, kept) in enumerate(rows.items()))
    cut_refs = {one.whole.name: one.ref for one in cut}
    layers = tuple(_kept_layer(layer, of_layer[layer.name], cut_refs) for layer in experts.layers)
    return Pruned(_with_layers(experts, layers), new_config, cut)


def _cut(whole: TensorRef, kept: KeptExperts, place: int) -> CutTensor:
    axis = next((number for number, size in enumerate(whole.shape) if size != 1), 0)
    shape = (*whole.shape[:axis], len(kept.experts), *whole.shape[axis + 1 :])
    num_bytes = whole.num_bytes // kept.count * len(kept.experts)
    return CutTensor(whole, kept, whole._replace(shape=shape, offset_bytes=BEHIND + place * APART, num_bytes=num_bytes))


def _checked(experts: ExpertMap, selection: Selection) -> dict[str, KeptExperts]:
    found = selection.by_name({layer.name: layer.index for layer in experts.layers})
    for layer in experts.layers:
        wrong = next((expert for expert in found[layer.name] if not 0 <= expert < layer.num_experts), None)
        if wrong is not None:
            expected = f"numbers from 0 to {layer.num_experts - 1}"
            what, where = "The layer has no such expert.", f"{selection.where}: {layer.name}"
            raise RequestError(what, where=where, expected=expected, found=wrong, remedy="Correct the file.")
    return {layer.name: KeptExperts(found[layer.name], layer.num_experts) for layer in experts.layers}


def _counts(experts: ExpertMap, of_layer: Mapping[str, KeptExperts]) -> tuple[int, int]:
    """Return the number of experts of every layer, before and after."""
    first = experts.layers[0]
    for layer in experts.layers:
        old, new = (first.num_experts, layer.num_experts), (of_layer[first.name], of_layer[layer.name])
        if old[0] != old[1]:
            what, expected = "The layers have different numbers of experts.", f"{old[0]}, as in {first.name}"
            raise RequestError(what, where=layer.name, expected=expected, found=old[1], remedy=_REMEDY)
        if len(new[0].experts) != len(new[1].experts):
            raise RequestError(
                "The layers keep different numbers of experts.",
                where=f"{OPTION}, {layer.name}",
                expected=f"{len(new[0].experts)}, as in {first.name}: config.json has one number for all layers",
                found=len(new[1].experts),
                remedy="Keep as many experts in every layer.",
            )
    return first.num_experts, len(of_layer[first.name].experts)


# --- config.json ----------------------------------------------------------------------------------------------


def _config(
    config: Mapping[str, Any], text: Config, family: Family, of_layer: Mapping[str, KeptExperts]
) -> dict[str, Any]:
    """Return config.json with the new number of experts under every key that holds the old one."""
    if family.layer_configs_key and text.get(family.layer_configs_key) is not None:
        what = "The config describes each layer on its own: which values depend on the number of experts is not known."
        raise RequestError(what, where=f"config.json: {family.layer_configs_key}", remedy=_REMEDY)
    first = next(iter(of_layer.values()))
    groups = _groups(text, first, of_layer)
    document, count, number, num_changed = copy.deepcopy(dict(config)), first.count, len(first.experts), 0
    for level in _levels(document):
        for key in NUM_EXPERTS_KEYS:
            value = level.get(key)
            if value == count and type(value) is int:
                level[key], num_changed = number, num_changed + 1
            elif isinstance(value, list) and value and all(one == count for one in value):
                level[key], num_changed = [number] * len(value), num_changed + 1
        for key, value in groups.items():
            if key in level:
                level[key] = value
    if not num_changed:
        expected = f"{count} under {' or '.join(family.num_experts_keys)}"
        what = "The config does not hold the number of experts."
        raise RequestError(what, where="config.json", expected=expected, found="no such value", remedy=_REMEDY)
    return document


def _levels(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the language model's configs in it."""
    yield document
    for key in TEXT_CONFIG_KEYS:
        if isinstance(document.get(key), dict):
            yield from _levels(document[key])


def _groups(text: Config, kept: KeptExperts, of_layer: Mapping[str, KeptExperts]) -> dict[str, int]:
    """Return the new values of the keys of expert groups: whole groups may be left out.

    Raises RequestError where the kept experts of a layer are no groups of equal size.
    """
    values = {key: value for key, value in text.items() if isinstance(value, int) and not isinstance(value, bool)}
    named = [key for key in _NUM_GROUPS if key in values]
    unknown = [
        key
        for key, value in values.items()
        if "group" in key and any(word in key for word in ("expert", "topk", "top_k", "rout", "moe"))
        if key not in (*_NUM_GROUPS, *_TOP_GROUPS) and value != 1
    ]
    if unknown:
        what = "The config has a number of groups that is not known."
        raise RequestError(what, where=f"config.json: {unknown[0]}", found=values[unknown[0]], remedy=_REMEDY)
    num_groups = {values[key] for key in named} - {0, 1}
    if not num_groups:
        return {}
    old = num_groups.pop()
    if num_groups or kept.count % old:
        found = ", ".join(f"{key} {values[key]}" for key in named)
        expected = f"one divisor of {kept.count}"
        what = "The experts' groups are not equal."
        raise RequestError(what, where="config.json", expected=expected, found=found, remedy=_REMEDY)
    new = {name: _num_groups(name, one, old) for name, one in of_layer.items()}
    first_name, first = next(iter(new.items()))
    other = next((name for name, one in new.items() if one != first), None)
    if other is not None:
        what, expected = "The layers keep different numbers of groups.", f"{first}, as in {first_name}"
        raise RequestError(what, where=f"{OPTION}, {other}", expected=expected, found=new[other])
    size = len(kept.experts) // first
    top = {key: values[key] for key in _TOP_GROUPS if key in values}
    for key, value in top.items():
        if value > first:
            what, expected = "Fewer groups are kept than serve a token.", f"at least {value} groups ({key})"
            raise RequestError(what, where=OPTION, expected=expected, found=first, remedy="Keep more groups.")
    if size < _SCORED_BY:
        expected = f"at least {_SCORED_BY} experts: their scores are the group's"
        what = "The groups of kept experts are too small."
        raise RequestError(what, where=OPTION, expected=expected, found=size, remedy="Keep more experts.")
    least = min(top.values(), default=first) * size
    most = max((one for key in _TOP_K if isinstance(one := text.get(key), int)), default=0)
    if least < most:
        what, expected = "The groups that serve a token have too few experts.", f"at least {most}"
        raise RequestError(what, where=OPTION, expected=expected, found=least, remedy="Keep more experts.")
    return dict.fromkeys(named, first)


_TOP_K = tuple(dict.fromkeys(key for row in FAMILIES for key in row.top_k_keys))


def _num_groups(name: str, kept: KeptExperts, old: int) -> int:
    """Return the number of groups of a layer's kept experts. Raises RequestError unless they are equal runs."""
    size = kept.count // old
    runs: list[list[int]] = []  # group, number of its experts
    for expert in kept.experts:
        if runs and runs[-1][0] == expert // size:
            runs[-1][1] += 1
        else:
            runs.append([expert // size, 1])
    if len({number for _, number in runs}) > 1 or len({group for group, _ in runs}) < len(runs):
        raise RequestError(
            "The kept experts of a layer are no equal groups.",
            where=f"{OPTION}, {name}",
            expected=f"equally many experts of each kept group ({old} groups of {size}), group after group",
            found=first_few([f"{number} of group {group}" for group, number in runs]),
            remedy="Keep as many experts in each group, and list those of a group together.",
        )
    return len(runs)


def _check_top_k(experts: ExpertMap, number: int) -> None:
    for layer in experts.layers:
        if layer.top_k > number:
            what, expected = "Fewer experts are kept than serve a token.", f"at least {layer.top_k}"
            where, remedy = f"{OPTION}, {layer.name}", "Keep more experts."
            raise RequestError(what, where=where, expected=expected, found=number, remedy=remedy)


# --- tensors --------------------------------------------------------------------------------------------------


def _moe_module(layer: str) -> str:
    """Return the path of the module that holds router and experts."""
    path = layer.removesuffix(".mlp") if layer.endswith(".experts.mlp") else layer
    return path.removesuffix(".experts")


def router_tensors(layer: MoeLayer, copied: tuple[str, ...], tensors: Mapping[str, TensorRef], count: int) -> list[str]:
    """Return the copied tensors of a layer that have one entry for each expert, of `count`.

    Raises RequestError if the router is not among them, or if a tensor is not known that may have such entries.
    """
    module = _moe_module(layer.name)
    start, inside = f"{module}.", _decoder_layer(module)
    found = []
    for name in copied:
        if not name.startswith(inside):
            continue
        rest, ref = name.removeprefix(start), tensors[name]
        if rest in ROUTERS or rest in EXPERT_NUMBERS or name.removeprefix(inside) in _IN_LAYER:
            _check_rows(ref, count, is_matrix=rest in ROUTERS)
            found.append(name)
        elif rest.endswith(_HASH_TABLE):
            what = "The layer chooses experts by a table of tokens, whose numbers would be wrong."
            raise RequestError(what, where=name, remedy="Keep all experts of this model.")
        elif rest not in _INDEPENDENT and _may_know_experts(name, inside, start, ref, {count, layer.num_experts}):
            raise RequestError(
                "A tensor of the router is not known: it may have an entry for each expert.",
                where=name,
                expected=f"names such as {', '.join((*ROUTERS[:2], *EXPERT_NUMBERS[:2]))}",
                found=f"{ref.dtype} {list(ref.shape)}",
                remedy=_REMEDY,
            )
    routers = [name for name in found if name.removeprefix(start) in ROUTERS]
    if len(routers) != 1:
        raise RequestError(
            "The router of a layer is not known.",
            where=layer.name,
            expected=f"one tensor [{count}, {layer.hidden_size}] such as {start}{ROUTERS[0]}",
            found=first_few(routers) if routers else "none",
            remedy=_REMEDY,
        )
    return found


def _decoder_layer(module: str) -> str:
    """Return the start of the names of the decoder layer's tensors."""
    path = module.split(".")
    last = max((number for number, word in enumerate(path) if word.isdigit()), default=len(path) - 1)
    return f"{'.'.join(path[: last + 1])}."


def _may_know_experts(name: str, layer: str, module: str, ref: TensorRef, counts: set[int]) -> bool:
    """Return whether an unknown tensor may depend on the experts: by its name, in the MoE module also by its shape.

    layer, module: the starts of the names in the decoder layer and in its MoE module, which may be the same.
    """
    words = name.removeprefix(layer).split(".")
    if any(word in _OTHERS or "norm" in word or "attn" in word or "attention" in word for word in words):
        return False
    if any("router" in word or "expert" in word or word in ("moe", "moe_statics") for word in words):
        return True
    if not name.startswith(module):
        return False
    word = name.removeprefix(module).partition(".")[0]
    if layer == module and word in _DENSE:
        return False
    return word == "gate" or not counts.isdisjoint(ref.shape)


def _check_rows(ref: TensorRef, count: int, *, is_matrix: bool) -> None:
    shape = ref.shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    if not shape or shape[0] != count or (len(shape) > 1) != is_matrix or ref.num_bytes % count:
        expected = f"[{count}, …]" if is_matrix else f"[{count}]"
        what = "A tensor of the router has not one entry for each expert."
        raise RequestError(what, where=ref.name, expected=expected, found=list(ref.shape), remedy=_REMEDY)


def _stacked_scales(layer: MoeLayer) -> Iterator[str]:
    """Yield the static scales of activations that lie in one tensor for all experts."""
    for refs in layer.input_scales.refs.values():
        for ref in refs:
            if _expert_of(layer, ref.name) is None and ref.shape[:1] == (layer.num_experts,) and layer.num_experts > 1:
                yield ref.name


def _expert_of(layer: MoeLayer, name: str) -> int | None:
    """Return the expert in the name of a tensor of its own."""
    word = name.removeprefix(f"{layer.name}.").partition(".")[0]
    return int(word) if word.isdigit() else None


def _kept_layer(layer: MoeLayer, kept: KeptExperts, cut: Mapping[str, TensorRef]) -> MoeLayer:
    """Return the layer with some of its experts. cut: scales of all experts by name."""
    number, chosen = len(kept.experts), set(kept.experts)
    parts = {
        role: {part: _kept_slice(layer, one, number) for part, one in of_role.items()}
        for role, of_role in layer.parts.items()
    }
    scales = layer.input_scales
    refs = {
        gemm: tuple(cut.get(ref.name, ref) for ref in of if (e := _expert_of(layer, ref.name)) is None or e in chosen)
        for gemm, of in scales.refs.items()
    }
    missing = {
        gemm: tuple(name for name in names if (e := _expert_of(layer, name)) is None or e in chosen)
        for gemm, names in scales.missing.items()
    }
    return replace(
        layer,
        num_experts=number,
        parts=parts,
        sources=KeptIndex(layer.sources, kept.experts),
        input_scales=InputScales(scales.a_dtype, refs, scales.max_values, missing),
        kept=kept,
    )


def _kept_slice(layer: MoeLayer, part: TensorSlice, number: int) -> TensorSlice:
    """Return a part with the shape that it has in a checkpoint of the kept experts alone."""
    count, shape = layer.num_experts, part.shape
    if not part.is_stacked or layer.format.encoding == LAID_OUT or not shape:
        return part
    if part.is_flat and shape[0] % count == 0:
        return replace(part, shape=(shape[0] // count * number, *shape[1:]))
    return replace(part, shape=(number, *shape[1:])) if shape[0] == count else part


def _with_layers(experts: ExpertMap, layers: tuple[MoeLayer, ...]) -> ExpertMap:
    """Return the map with the tensors of experts that are left out among those that are dropped."""
    left_out: dict[str, str] = {}
    for before, after in zip(experts.layers, layers, strict=True):
        assert after.kept is not None
        kept = set(after.tensor_names())
        for name in before.tensor_names():
            if name not in kept:
                left_out[name] = f"expert {_expert_of(before, name)} is none of the kept experts ({OPTION})"
    converted = {name: layer for name, layer in experts.converted.items() if name not in left_out}
    assert len(converted) + len(left_out) == len(experts.converted), "a tensor of another layer was left out"
    return replace(experts, layers=layers, converted=converted, dropped={**experts.dropped, **left_out})
