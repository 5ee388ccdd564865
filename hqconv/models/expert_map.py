"""Sorts a checkpoint's tensors into MoE layers by their names, without a regex match for every name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hqconv.errors import InputError, RequestError, first_few, plural
from hqconv.formats.encoding import UNUSED_PARTS
from hqconv.formats.mx import undeclared_format
from hqconv.formats.quant_config import DeclaredFormats, declared_formats
from hqconv.formats.source_format import KNOWN_BY_SOURCE, PLAIN, SourceFormat
from hqconv.models.config_facts import (
    TWICE,
    activation_of,
    config_number,
    config_sizes,
    contradiction,
    is_draft,
    layer_config,
    layer_indices,
    named_activation,
    top_k,
)
from hqconv.models.families import Config, Family, text_config
from hqconv.models.family_choice import (
    choose_family,
    looks_like_expert,
    name_pattern,
    unmatched_error,
)
from hqconv.models.halves import halves_warnings
from hqconv.models.layer_builder import LayerTensors, build_layer, check_once
from hqconv.models.loadable import check_routers, decoder_layer, refuse_leftovers
from hqconv.models.moe_layer import MoeLayer, Parts, PerExpertIndex
from hqconv.schemas.dtypes import FLOATS
from hqconv.schemas.tensors import TensorRef

_STACK_DIMS = 3  # [E, out, in]
_ROUTER = re.compile(r"(.+)\.(?:router|gate)(?:\.[a-z]+)?\.weight$")


def group(
    family: Family, tensors: Mapping[str, TensorRef]
) -> tuple[dict[str, LayerTensors], list[str]]:
    """Return the tensors of each layer (experts module), and the expert-like names that match no template."""
    groups = NameGroups(family)
    unmatched = []
    for name, ref in tensors.items():
        if "expert" not in name and "moe" not in name:  # no expert's: there may be a million
            if family.is_unmarked and len(ref.shape) == _STACK_DIMS:
                groups.takes(name, ref)
            continue
        if (
            groups.takes_known(name, ref)
            or groups.takes(name, ref)
            or name.startswith(family.other_models)
        ):
            continue
        if looks_like_expert(name, len(ref.shape)):
            unmatched.append(name)
    if family.is_unmarked:
        unmatched += _parts_left_over(family, groups.found, tensors)
    return groups.found, unmatched


def _parts_left_over(
    family: Family, found: Mapping[str, LayerTensors], tensors: Mapping[str, TensorRef]
) -> list[str]:
    """List tensors that lie beside the stacks of a layer by their names, such as scales, and were not taken."""
    taken = {
        ref.name
        for layer in found.values()
        for parts in layer.stacks.values()
        for ref in parts.values()
    }
    beside = tuple(f"{layer}.{stack.name}" for layer in found for stack in family.stacks)
    return [name for name in tensors if name not in taken and name.startswith(beside)]


class NameGroups:
    """Layers (experts modules) and their tensors found so far.

    A name of a single expert is a layer, an index and an ending, with dots between. A match depends on each of these
    three alone: a name whose three components have each matched before needs no regular expression.

    found: layer name → its tensors.
    """

    def __init__(self, family: Family) -> None:
        self.found: dict[str, LayerTensors] = {}
        self._match = name_pattern(family).fullmatch
        self._roles_of: dict[str, tuple[str, ...]] = {
            name: (role,) for one in family.spellings for role, name in one.items()
        }
        self._roles_of |= {stack.name: stack.roles for stack in family.expert_stacks}
        self._indices: dict[str, int] = {}
        self._endings: dict[str, tuple[str, str]] = {}  # → projection and part
        self._start, self._last = (
            "\0",
            LayerTensors(),
        )  # the last layer, and what its names begin with: none, so far

    def takes_known(self, name: str, ref: TensorRef) -> bool:
        """Store a tensor of the last layer if its index and ending are known; return True if it was stored."""
        if not name.startswith(self._start):
            return False
        word, _, ending = name[len(self._start) :].partition(".")
        place, index = self._endings.get(ending), self._indices.get(word)
        if place is None or index is None:
            return False
        self._store(index, *place, ref)
        return True

    def takes(self, name: str, ref: TensorRef) -> bool:
        """Store a tensor whose name matches the family; return True if it was stored."""
        matched = self._match(name)
        if matched is None:
            return False
        layer, word, projection, part, *stack = matched.groups()
        found = self.found.setdefault(layer, LayerTensors())
        if word is None:
            found.stacks.setdefault(stack[0], {})[stack[1] or "weight"] = ref
            return True
        self._start, self._last = f"{layer}.", found
        self._indices[word] = int(word)
        self._endings[f"{projection}.{part}"] = (projection, part)
        self._store(int(word), projection, part, ref)
        return True

    def _store(self, expert: int, projection: str, part: str, ref: TensorRef) -> None:
        found = self._last
        roles = found.experts.get(expert)
        if roles is None:
            roles = found.experts[expert] = {}
        for role in self._roles_of[projection]:
            parts = roles.get(role)
            if parts is None:
                parts = roles[role] = {}
            if (first := parts.setdefault(part, ref)) is not ref:
                check_once(self._start[:-1], ref, first)
            if found.words.setdefault(role, projection) != projection:
                what = "The experts of a layer have different names for a projection."
                expected = f"{found.words[role]}, as in the layer's other experts"
                raise contradiction(what, ref.name, expected, projection, TWICE)


@dataclass(frozen=True)
class ExpertMap:
    """Use of every tensor of a checkpoint: each is in exactly one of `converted`, `copied`, `dropped`.

    config_warnings: keys of the quantization config that hqconv does not know, and doubts about what a writer stored.
    """

    family: str
    chosen_because: str
    layers: tuple[MoeLayer, ...]
    converted: dict[str, str]
    copied: tuple[str, ...]
    dropped: dict[str, str]
    left: tuple[str, ...] = ()  # layers whose tensors are copied as they are
    is_own_row: bool = True  # False where no row names the model_type, and another one's names fit
    config_warnings: tuple[str, ...] = ()

    def with_input_scales(self, names: Collection[str]) -> ExpertMap:
        """Return the map with the activation scales of some layers converted, which are dropped otherwise."""
        layers = [layer for layer in self.layers if layer.name in names]
        moved = {name: layer.name for layer in layers for name in layer.input_scales.names}
        dropped = {name: reason for name, reason in self.dropped.items() if name not in moved}
        return replace(self, converted={**self.converted, **moved}, dropped=dropped)

    def without(self, names: Collection[str], order: Iterable[str]) -> ExpertMap:
        """Return the map with the tensors of some layers copied, in the source's `order` of all tensors.

        Raises RequestError if no layer is left to convert, and for sources whose experts are no tensors to copy.
        """
        kept = tuple(layer for layer in self.layers if layer.name not in names)
        foreign = next(
            (
                b
                for b in self.layers
                if b.name in names and b.format.of("w2").encoding in KNOWN_BY_SOURCE
            ),
            None,
        )
        if foreign is not None:
            what = "Experts can be left as they are in a checkpoint only, not in an artifact or GGUF files."
            raise RequestError(what, where=foreign.name, remedy="Convert the original checkpoint.")
        if not kept:
            raise RequestError(
                "All experts would be left as they are: nothing to convert.", where="overrides"
            )
        moved = {name for name, layer in self.converted.items() if layer in names}
        # Copied in full: tensors that a conversion would not need, such as scales of activations, are copied with them.
        within = tuple(f"{layer.name}." for layer in self.layers if layer.name in names)
        moved |= {name for name in self.dropped if name.startswith(within)}
        copied = moved.union(self.copied)
        converted = {name: layer for name, layer in self.converted.items() if name not in moved}
        left = (*self.left, *(layer.name for layer in self.layers if layer.name in names))
        return replace(
            self,
            layers=kept,
            converted=converted,
            copied=tuple(name for name in order if name in copied),
            dropped={name: reason for name, reason in self.dropped.items() if name not in moved},
            left=left,
        )


def map_experts(
    tensors: Mapping[str, TensorRef], config: Config, quantization: Mapping[str, Any] | None = None
) -> ExpertMap:
    """Sort a checkpoint's tensors into MoE layers, in layer order, and tensors to copy.

    `tensors` are all tensors by name, `config` is config.json, `quantization` its quantization_config or the document
    of a separate file. Raises RequestError for experts that this version cannot convert (unknown names or formats,
    none at all) and InputError if names, shapes, dtypes and config contradict one another.
    """
    text = text_config(config)
    candidates = [
        name
        for name, ref in tensors.items()
        if ("expert" in name or "moe" in name) and looks_like_expert(name, len(ref.shape))
    ]
    choice = choose_family(candidates, config, text)
    family, because = choice.family, choice.because
    text = family.config_values(text)
    candidates = [name for name in candidates if not name.startswith(family.other_models)]
    declared = declared_formats(quantization, text)
    grouped, unmatched = group(family, tensors)
    if unmatched:
        raise unmatched_error(InputError, family, unmatched, because)
    if not grouped:
        raise _nothing_found(family, tensors, because)
    _check_one_module(grouped)
    indices = layer_indices(family, grouped, text)
    dropped = _drop_zero_experts(family, grouped, indices, text)
    activation, origin = named_activation(choice, text)

    def remedy_of(module: str) -> str:
        matrices = (ref for ref in tensors.values() if len(ref.shape) > 1)
        return declared.remedy(
            module, is_left_over=all(ref.dtype in (*FLOATS, "I64", "BOOL") for ref in matrices)
        )

    layers = []
    for name in sorted(grouped, key=lambda name: (indices[name], name)):
        index, found = indices[name], grouped.pop(name)  # a layer has them in less memory
        own = layer_config(family, index, text)
        facts = {
            "index": index,
            "activation": activation_of(choice, activation, index, own),
            "top_k": top_k(family, name, index, own),
        }
        format_of = _formats(declared, family, name, found, is_draft(family, index, text))
        layer, unused = build_layer(
            family, name, found, config_sizes(family, index, own), format_of, remedy_of, facts
        )
        layers.append(layer)
        dropped |= unused
    converted = {name: layer.name for layer in layers for name in _names(layer)}
    copied = tuple(name for name in tensors if name not in converted and name not in dropped)
    refuse_leftovers(copied)
    check_routers(layers, copied, tensors, is_own_row=choice.is_own_row)
    assert len(converted) + len(dropped) + len(copied) == len(tensors), (
        "an expert tensor was counted twice"
    )
    assert all(name in converted or name in dropped for name in candidates), (
        "an expert tensor was lost"
    )
    return ExpertMap(
        family.name,
        f"{because}; {origin}",
        tuple(layers),
        converted,
        copied,
        dropped,
        is_own_row=choice.is_own_row,
        config_warnings=(*declared.warnings, *halves_warnings(layers, quantization)),
    )


def _check_one_module(layers: Iterable[str]) -> None:
    """Check that no decoder layer has experts under two paths."""
    found: dict[str, str] = {}
    for name in layers:
        if (other := found.setdefault(decoder_layer(name), name)) != name:
            raise contradiction(
                "A layer has its experts twice.",
                name,
                "one module of experts",
                f"also {other}",
                TWICE,
            )


def _nothing_found(family: Family, tensors: Mapping[str, TensorRef], because: str) -> RequestError:
    """Return the error for a checkpoint without experts, or with stacks beside a router that no row describes."""
    if stacks := _stacks_beside_router(tensors):
        return RequestError(
            "The model has experts of a form that is not known.",
            where=first_few(stacks),
            expected=f"names such as {family.example()} ({because})",
            found=f"{plural(len(stacks), 'tensor')} of three dimensions beside a router",
            remedy="Check model_type in config.json; a new form needs a row in hqconv/models/families.py.",
        )
    return RequestError(
        "There are no MoE experts: nothing to convert.",
        expected=f"tensors such as {family.example()}",
        found=f"{plural(len(tensors), 'tensor')}, none of an expert ({because})",
        remedy="Convert a Mixture-of-Experts checkpoint; check that the folder holds all of its files.",
    )


def _stacks_beside_router(tensors: Mapping[str, TensorRef]) -> list[str]:
    """List tensors of three dimensions, one for each expert, in modules that have a router [E, H] as well."""
    routers = {
        match[1]: ref.shape[0]
        for name, ref in tensors.items()
        if ref.shape and (match := _ROUTER.match(name))
    }
    return [
        name
        for name, ref in tensors.items()
        if len(ref.shape) == _STACK_DIMS
        and any(
            routers.get(name[: dot.start()]) == ref.shape[0] for dot in re.finditer(r"\.", name)
        )
    ]


def _names(layer: MoeLayer) -> Iterable[str]:
    """List a layer's tensors; for experts with separate tensors, the checkpoint's own string objects."""
    return (
        layer.sources.names() if isinstance(layer.sources, PerExpertIndex) else layer.tensor_names()
    )


def _formats(
    declared: DeclaredFormats, family: Family, layer: str, found: LayerTensors, is_extra: bool
) -> Callable[[str], SourceFormat]:
    """Return a lookup of the declared format of a layer's modules.

    Humming's rules name the experts module, as vLLM does, or one module of one expert.

    `is_extra`: a layer after the decoder's last one, for multi-token prediction. Servers skip these layers, so ignore
    lists often omit them although they are not quantized.
    """
    if is_extra and _is_plain(found):
        return lambda _module: PLAIN
    if declared.method == "humming":
        of_layer, words = declared.of(layer), family.spelled(found.words, found.stacks).projections
        roles = {f".{word}": role for role, word in words.items()}

        def of_module(module: str) -> SourceFormat:
            fmt = of_layer if of_layer.is_float else declared.of_single(module) or of_layer
            return fmt.of(next((roles[end] for end in roles if module.endswith(end)), "w13"))

        return of_module
    if declared.method == "none" and family.name == "inkling2":
        of_stacks = {
            f"{layer}.{stack}": undeclared_format(parts) for stack, parts in found.stacks.items()
        }
        return lambda module: of_stacks.get(module, PLAIN)
    plain = set() if declared.undecided is None else _plain_modules(found)
    modules = [f"{layer}.0.{word}" for word in found.words.values()] + [
        f"{layer}.{stack}" for stack in found.stacks
    ]

    def lookup(named: Callable[[str], str]) -> Callable[[str], SourceFormat]:
        if named is str and not plain:
            return declared.of
        return lambda module: declared.of(named(module), is_stored_plain=module in plain)

    own, is_plain = lookup(str), _is_plain(found)
    is_own_meant = all(own(module).is_float for module in modules) == is_plain
    if is_own_meant or (not is_plain and any(map(declared.leaves_out, modules))):
        return own

    def is_meant(named: Callable[[str], str]) -> bool:
        if is_plain:
            return all(declared.leaves_out(named(module)) for module in modules)
        return not all(declared.of(named(module)).is_float for module in modules)

    return next((lookup(named) for named in _namings(family, layer) if is_meant(named)), own)


def _namings(family: Family, layer: str) -> Iterator[Callable[[str], str]]:
    """Yield how a config may name a layer's modules otherwise than its tensors are: by other spellings of the family.

    Some tools give their configs the names of transformers' classes, and the tensors those of the release.
    """
    number = decoder_layer(layer).rstrip(".").rpartition(".")[2]
    paths = [
        path.format(layer=number) for path in family.paths if ("mtp" in path) == ("mtp" in layer)
    ]
    for path, spelling in itertools.product([layer, *paths], family.spellings):
        words = {
            word: spelling[role]
            for one in family.spellings
            for role, word in one.items()
            if role in spelling
        }

        def named(module: str, path: str = path, words: Mapping[str, str] = words) -> str:
            before, _, word = module.removeprefix(layer).rpartition(".")
            return f"{path}{before}.{words.get(word, word)}"

        yield named


def _is_plain(found: LayerTensors) -> bool:
    """Return True if a layer's tensors are all plain floats, which no quantized format has."""
    return all(map(_are_floats, _modules(found)))


def _modules(found: LayerTensors) -> Iterator[Parts]:
    """Yield the parts of every module of a layer."""
    single = (parts for roles in found.experts.values() for parts in roles.values())
    return itertools.chain(single, found.stacks.values())


def _are_floats(parts: Parts) -> bool:
    return all(
        key in ("weight", "bias") and ref.dtype in FLOATS
        for key, ref in parts.items()
        if key not in UNUSED_PARTS
    )


def _plain_modules(found: LayerTensors) -> set[str]:
    """Return the paths of a layer's modules whose tensors are all plain floats."""
    plain = (next(iter(parts.items())) for parts in _modules(found) if _are_floats(parts))
    return {ref.name.removesuffix(f".{key}") for key, ref in plain}


def _drop_zero_experts(
    family: Family, grouped: Mapping[str, LayerTensors], layers: Mapping[str, int], text: Config
) -> dict[str, str]:
    """Remove identity experts, E..E+Z-1, from `grouped`; transformers 5 writes gate and up for them.

    In a stack they are its end, which no byte range of an expert reaches.
    """
    dropped: dict[str, str] = {}
    for name, found in grouped.items():
        experts = found.experts
        count = config_number(text, family.num_experts_keys, layers[name])
        zeros = config_number(text, family.zero_experts_keys, layers[name])
        if count is None or zeros is None:
            continue
        for e in [
            e for e in experts if count[1] <= e < count[1] + zeros[1] and "w2" not in experts[e]
        ]:
            reason = f"expert {e} is a zero-expert ({zeros[0]} {zeros[1]}): an identity, its weights are unused"
            dropped |= {
                ref.name: reason for parts in experts.pop(e).values() for ref in parts.values()
            }
        for parts in found.stacks.values():
            for part, ref in parts.items():
                if ref.shape and ref.shape[0] == count[1] + zeros[1]:
                    num_bytes = ref.num_bytes // ref.shape[0] * count[1]
                    parts[part] = ref._replace(
                        shape=(count[1], *ref.shape[1:]), num_bytes=num_bytes
                    )
    return dropped
