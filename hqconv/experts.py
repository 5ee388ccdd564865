"""Finds the experts of a checkpoint from tensor names, shapes and the config; reads no tensor bytes.

Every source tensor is converted, copied or dropped exactly once. What looks like an expert tensor and is
not understood is refused: copied as if it were dense, it would leave a model that runs and answers wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from hqconv.errors import HqconvError, InputError, RequestError
from hqconv.schemas.families import BY_MODEL_TYPE, FAMILIES, Config, Family, text_config

if TYPE_CHECKING:
    from hqconv.checkpoint import TensorRef

FLOAT_DTYPES = ("BF16", "F16", "F32")
NUM_NAMES_SHOWN = 5

_EXPERTS_SEGMENT = re.compile(r"(?:^|\.)experts\.")
# What fp8, compressed-tensors, GPTQ, AWQ, mxfp4 and ModelOpt store next to a weight or instead of it.
_QUANTIZED_SUFFIX = re.compile(
    r"[._](?:weight_scale(?:_inv|_2)?|weight_packed|weight_shape|weight_zero_point|weight_g_idx|qweight|qzeros"
    r"|scales?|g_idx|input_scale|blocks|scale_inv)$"
)

Size = tuple[str, int]  # the config key it came from, "" if from shapes, and the value
Experts = dict[int, "dict[str, dict[str, TensorRef]]"]


@dataclass(frozen=True)
class ExpertBlock:
    """One MoE layer's experts. `sources[e]["w1"]["weight"]` is the TensorRef of expert e's gate, `[out, in]`.

    w1 = gate, w3 = up (both `[intermediate, hidden]`), w2 = down (`[hidden, intermediate]`); a block that
    is not gated has no w1. `hidden_size` is what the experts see: a latent size in some nemotron_h.
    `layer` counts a separate `mtp.layers.i` on from the last decoder layer.
    """

    name: str
    family: str
    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    activation: str
    top_k: int
    dtype: str
    sources: tuple[dict[str, dict[str, TensorRef]], ...]


@dataclass(frozen=True)
class ExpertMap:
    """The accounting of a checkpoint: each tensor is in exactly one of `converted`, `copied`, `dropped`."""

    family: str
    chosen_because: str
    blocks: tuple[ExpertBlock, ...]
    converted: dict[str, str]
    copied: tuple[str, ...]
    dropped: dict[str, str]


def map_experts(tensors: Mapping[str, TensorRef], config: Config) -> ExpertMap:
    """Sorts a checkpoint's tensors into expert blocks, in layer order, and tensors to copy.

    `tensors` are all tensors by name, `config` is config.json. Raises RequestError for experts this
    version cannot convert (fused, quantized, unknown names, none at all) and InputError where names,
    shapes, dtypes and config contradict one another.
    """
    text = text_config(config)
    candidates = [name for name, ref in tensors.items() if _looks_like_expert(name, len(ref.shape))]
    choice = _choose_family(candidates, config, text)
    family, because = choice.family, choice.because
    grouped, unmatched = _group(family, tensors, candidates)
    _refuse_unsupported(grouped, unmatched, tensors)
    if unmatched:
        raise _unmatched_error(InputError, family, unmatched, because)
    if not grouped:
        raise RequestError(
            "no MoE experts found: nothing to convert",
            expected=f"tensors such as {family.example()}",
            found=f"{len(tensors)} tensors, none of an expert ({because})",
            remedy="convert a Mixture-of-Experts checkpoint; check that the folder holds all of its files",
        )
    activation, origin = _activation(choice, text)
    layers = _layer_indices(family, grouped, text)
    dropped = _drop_zero_experts(family, grouped, layers, text)
    blocks = tuple(
        _build_block(family, name, layers[name], grouped[name], text, activation)
        for name in sorted(grouped, key=lambda name: (layers[name], name))
    )
    converted = {ref.name: block.name for block in blocks for ref in _refs(block.sources)}
    copied = tuple(name for name in tensors if name not in converted and name not in dropped)
    assert len(converted) + len(dropped) == len(candidates), "an expert tensor was lost or counted twice"
    return ExpertMap(family.name, f"{because}; {origin}", blocks, converted, copied, dropped)


def _looks_like_expert(name: str, num_dims: int) -> bool:
    """Whether the tensor lies in an `experts` module, or is a 3-D stack in some other MoE module."""
    if "expert" not in name and "moe" not in name:
        return False
    return _EXPERTS_SEGMENT.search(name) is not None or num_dims == 3


class _Choice(NamedTuple):
    family: Family
    because: str
    is_own_row: bool  # the row that names this model_type, not merely one that fits


def _choose_family(candidates: list[str], config: Config, text: Config) -> _Choice:
    """The row of the model_type, or else the closest row that matches every candidate name."""
    outer, inner = str(config.get("model_type")), str(text.get("model_type"))
    known = BY_MODEL_TYPE.get(outer) or BY_MODEL_TYPE.get(inner)
    model_type = inner if known is not None and outer not in known.model_types else outer
    if known is not None and known.blocks:
        return _Choice(known, f"model_type {model_type}", True)
    # A family known as fused may still come per expert: so transformers 5 saves qwen3_5_moe.
    because = f"{'unknown' if known is None else 'fused'} model_type {model_type}"
    rows = [row for row in FAMILIES if row.blocks]
    rows.sort(key=lambda row: -_num_keys_found(row, text))  # stable: ties stay in table order
    unmatched: dict[re.Pattern[str], list[str]] = {}
    for row in rows:
        pattern = row.pattern()
        if pattern not in unmatched:
            unmatched[pattern] = [name for name in candidates if not pattern.fullmatch(name)]
        if candidates and not unmatched[pattern]:
            return _Choice(row, f"closest row {row.name} for {because}", False)
    if known is not None:
        raise _unsupported_error(known, model_type, candidates)
    closest = min(rows, key=lambda row: len(unmatched[row.pattern()]))
    if not candidates:
        return _Choice(closest, because, False)
    raise _unmatched_error(RequestError, closest, unmatched[closest.pattern()], because)


def _unsupported_error(known: Family, model_type: str, candidates: list[str]) -> RequestError:
    flags = [flag for flag in ("transposed", "interleaved") if getattr(known, flag)]
    return RequestError(
        f"not supported yet: {'fused' if known.fused else 'quantized'} experts (model_type {model_type})",
        where=_some(candidates),
        expected=f"a float tensor per expert and projection, such as {FAMILIES[0].example()}",
        found=", ".join(["all experts of a layer in one tensor", *flags]) if known.fused else "fp4 or fp8",
        remedy="convert a checkpoint of the model that has one unquantized tensor per expert",
    )


def _num_keys_found(row: Family, text: Config) -> int:
    groups = (row.num_experts_keys, row.top_k_keys, row.intermediate_size_keys, row.activation_keys)
    # A row's first key counts most: the later ones are other spellings of the same value.
    return sum(2 if text.get(keys[0]) is not None else any(key in text for key in keys) for keys in groups)


def _group(
    family: Family, tensors: Mapping[str, TensorRef], candidates: list[str]
) -> tuple[dict[str, Experts], list[str]]:
    """block name → expert → role → {"weight": ref}, and the candidate names that matched nothing."""
    role_of = {name: role for role, name in family.projections.items()}
    part, match = family.suffix.removeprefix("."), family.pattern().fullmatch
    grouped: dict[str, Experts] = {}
    unmatched: list[str] = []
    for name in candidates:
        found = match(name)
        if found is None:
            unmatched.append(name)
            continue
        block, expert, projection = found.groups()
        roles = grouped.setdefault(block, {}).setdefault(int(expert), {})
        roles[role_of[projection]] = {part: tensors[name]}
    return grouped, unmatched


def _refuse_unsupported(
    grouped: Mapping[str, Experts], unmatched: list[str], tensors: Mapping[str, TensorRef]
) -> None:
    """Quantized and fused experts get a message of their own, whatever else may be wrong."""
    matched = (ref for experts in grouped.values() for ref in _refs(experts.values()))
    not_float = (ref for ref in matched if ref.dtype not in FLOAT_DTYPES)
    partners = (tensors[name] for name in unmatched if _QUANTIZED_SUFFIX.search(name))
    fused = (tensors[name] for name in unmatched if len(tensors[name].shape) == 3)
    for what, refs in (("quantized", chain(not_float, partners)), ("fused", fused)):
        if (ref := next(refs, None)) is not None:
            raise RequestError(
                f"not supported yet: {what} experts",
                where=ref.name,
                expected=f"one {', '.join(FLOAT_DTYPES)} matrix per expert and projection, without scales",
                found=f"{ref.dtype} {list(ref.shape)}",
                remedy="convert a checkpoint of the model that has one unquantized tensor per expert",
            )


def _unmatched_error(
    kind: type[HqconvError], family: Family, unmatched: list[str], because: str
) -> HqconvError:
    return kind(
        f"{len(unmatched)} tensors look like experts but their names are not understood",
        where=_some(unmatched),
        expected=f"names such as {family.example()} ({because})",
        found="extra, renamed or fused tensors, which must not be copied as if they were dense",
        remedy="check model_type in config.json; a new naming needs a row in hqconv/schemas/families.py",
    )


def _layer_indices(family: Family, names: Iterable[str], text: Config) -> dict[str, int]:
    """block name → layer; `mtp.layers.i` counts on from the last decoder layer, as vLLM numbers it."""
    index = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
    found = {name: int(match.group(1)) for name in names if (match := index.search(name))}
    mtp = {name for name in found if name.startswith(("mtp.", "language_model.mtp."))}
    last = max((layer for name, layer in found.items() if name not in mtp), default=-1)
    configured = _number(text, family.num_layers_keys, 0)
    offset = configured[1] if configured else last + 1
    return {name: layer + offset if name in mtp else layer for name, layer in found.items()}


def _drop_zero_experts(
    family: Family, grouped: Mapping[str, Experts], layers: Mapping[str, int], text: Config
) -> dict[str, str]:
    """Takes identity experts, E..E+Z-1, out of `grouped`; transformers 5 writes gate and up for them."""
    dropped: dict[str, str] = {}
    for name, experts in grouped.items():
        count = _number(text, family.num_experts_keys, layers[name])
        zeros = _number(text, family.zero_experts_keys, layers[name])
        if count is None or zeros is None:
            continue
        for e in [e for e in experts if count[1] <= e < count[1] + zeros[1] and "w2" not in experts[e]]:
            reason = (
                f"expert {e} is a zero-expert ({zeros[0]} {zeros[1]}): an identity, its weights are unused"
            )
            dropped |= {ref.name: reason for ref in _refs([experts.pop(e)])}
    return dropped


def _build_block(
    family: Family, name: str, layer: int, experts: Experts, text: Config, activation: str
) -> ExpertBlock:
    _check_indices(name, experts, _number(text, family.num_experts_keys, layer))
    sources = tuple(experts[e] for e in range(len(experts)))
    for e, roles in enumerate(sources):
        for role, projection in family.projections.items():
            if role not in roles:
                missing = f"{name}.{e}.{projection}{family.suffix}"
                raise _contradiction("an expert lacks a projection", missing, "present", "no such tensor")
    first = next(iter(sources[0]["w2"].values()))
    if len(first.shape) != 2:
        raise _contradiction("an expert is not a matrix", first.name, "2 dimensions", list(first.shape))
    hidden = _number(text, family.hidden_size_keys, layer) or ("", first.shape[0])
    intermediate = _number(text, family.intermediate_size_keys, layer) or ("", first.shape[1])
    _check_tensors(sources, hidden, intermediate, first)
    top_k = _number(text, family.top_k_keys, layer)
    if top_k is None:
        keys = " or ".join(family.top_k_keys)
        raise _contradiction("config.json lacks the experts per token", name, keys, "no such key")
    return ExpertBlock(
        name=name,
        family=family.name,
        layer=layer,
        num_experts=len(sources),
        hidden_size=hidden[1],
        intermediate_size=intermediate[1],
        gated=family.gated,
        activation=activation,
        top_k=top_k[1],
        dtype=first.dtype,
        sources=sources,
    )


def _check_indices(name: str, experts: Experts, count: Size | None) -> None:
    """Experts 0..E-1 are all there, E as the config says where it says so."""
    highest = max(experts, default=-1)
    expected = count[1] if count else highest + 1
    if len(experts) == expected == highest + 1:
        return
    first_missing = next(e for e in range(len(experts) + 1) if e not in experts)
    is_gap = first_missing < expected
    raise _contradiction(
        "the experts of a block are not complete" if is_gap else "a block has too many experts",
        f"{name}.{first_missing if is_gap else highest}",
        f"experts 0..{expected - 1}" + (f" ({count[0]} in config.json)" if count else ""),
        f"{len(experts)} experts, the highest is {highest}"
        + (f", the first missing is {first_missing}" if is_gap else ""),
    )


def _check_tensors(
    sources: tuple[dict[str, dict[str, TensorRef]], ...], hidden: Size, intermediate: Size, first: TensorRef
) -> None:
    """One dtype, and shapes w1, w3 `[I, H]`, w2 `[H, I]`, throughout the block."""
    wide, tall = (hidden[1], intermediate[1]), (intermediate[1], hidden[1])
    shapes = {"w1": tall, "w3": tall, "w2": wide}
    origin = ", ".join(f"{key} {size}" for key, size in (hidden, intermediate) if key)
    for role, ref in ((r, ref) for roles in sources for r, parts in roles.items() for ref in parts.values()):
        if ref.shape != shapes[role]:
            expected = f"{list(shapes[role])} = [out, in] from {origin or first.name}"
            raise _contradiction("an expert has an unexpected shape", ref.name, expected, list(ref.shape))
        if ref.dtype != first.dtype:
            raise _contradiction(
                "a block mixes dtypes", ref.name, f"{first.dtype} as {first.name}", ref.dtype
            )


def _activation(choice: _Choice, text: Config) -> tuple[str, str]:
    """The activation and where it came from; never guessed for a model_type without a row of its own."""
    family = choice.family
    for key in family.activation_keys:
        value = text.get(key)
        if isinstance(value, str) and value:
            return value, f"activation {value} from config {key}"
    if choice.is_own_row:
        return family.activation, f"activation {family.activation} is the family's own, the config names none"
    raise RequestError(
        "the experts' activation is not known",
        where="config.json",
        expected=f"a name under {' or '.join(family.activation_keys)}, such as 'silu'",
        found=f"none ({choice.because})",
        remedy=f'add "{family.activation_keys[0]}" to config.json',
    )


def _number(text: Config, keys: tuple[str, ...], layer: int) -> Size | None:
    """The first key the config has, with its value; a list holds one value per layer."""
    for key in keys:
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, list) and value:
            value = value[min(layer, len(value) - 1)]  # an MTP layer is built like the last one
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _contradiction(f"config.json: {key} is not usable", key, "a positive integer", text[key])
        return key, value
    return None


def _refs(experts: Iterable[dict[str, dict[str, TensorRef]]]) -> Iterable[TensorRef]:
    return (ref for roles in experts for parts in roles.values() for ref in parts.values())


def _contradiction(what: str, where: str, expected: object, found: object) -> InputError:
    return InputError(
        what,
        where=where,
        expected=expected,
        found=found,
        remedy="check that the checkpoint is complete and that config.json belongs to it",
    )


def _some(names: list[str]) -> str:
    more = f" … ({NUM_NAMES_SHOWN} of {len(names)})" if len(names) > NUM_NAMES_SHOWN else ""
    return ", ".join(names[:NUM_NAMES_SHOWN]) + more
