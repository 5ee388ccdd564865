"""Sorts a checkpoint's tensors into MoE layers by their names, without a regex match for every name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hqconv.errors import InputError, RequestError, plural
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
from hqconv.models.families import Family
from hqconv.models.layer_builder import LayerTensors, build_layer
from hqconv.models.moe_layer import MoeLayer, PerExpertIndex, TensorRefs
from hqconv.models.tensor_names import (
    check_routers,
    choose_family,
    decoder_layer,
    decoder_stack,
    looks_like_expert,
    name_pattern,
    refuse_leftovers,
    unmatched_error,
    without_wrappers,
)
from hqconv.schemas.artifact_names import Config, text_config
from hqconv.schemas.tensors import FLOATS, TensorRef

_STACK_DIMS = 3  # [E, out, in]


def _tensors_by_layer(
    family: Family, tensors: Mapping[str, TensorRef]
) -> tuple[dict[str, LayerTensors], list[str]]:
    """Return the tensors of each layer (experts module), and the expert-like names that match no template."""
    finder = _LayerFinder(family)
    unmatched = []
    for name, ref in tensors.items():
        if "expert" not in name and "moe" not in name:  # no expert's: there may be a million
            if family.is_unmarked and len(ref.shape) == _STACK_DIMS:
                finder.take(name, ref)
            continue
        is_known = finder.take(name, ref) or name.startswith(family.other_models)
        if not is_known and looks_like_expert(name, len(ref.shape)):
            unmatched.append(name)
    if family.is_unmarked:
        unmatched += _left_beside(finder.layers, tensors)
    return finder.layers, unmatched


def _left_beside(layers: Mapping[str, LayerTensors], tensors: Mapping[str, TensorRef]) -> list[str]:
    """List tensors whose names begin as those of a layer's stacks, such as scales, and that are not among them."""
    stacks = {
        f"{name}.{stack}": refs for name in layers for stack, refs in layers[name].stacks.items()
    }
    taken = {ref.name for refs in stacks.values() for ref in refs.values()}
    return [name for name in tensors if name not in taken and name.startswith(tuple(stacks))]


class _LayerFinder:
    """Layers (experts modules) and their tensors found so far.

    A name of a single expert is a layer, an index and an ending, with dots between. A match depends on each of these
    three alone: a name whose three components have each matched before needs no regular expression.

    layers: layer name → its tensors.
    """

    def __init__(self, family: Family) -> None:
        self.layers: dict[str, LayerTensors] = {}
        self._match = name_pattern(family).fullmatch
        self._roles: dict[str, tuple[str, ...]] = {}  # of a projection's or stack's name
        for spelling in family.spellings:
            self._roles |= {name: (role,) for role, name in spelling.items()}
        self._roles |= {stack.name: stack.roles for stack in family.expert_stacks}
        self._indices: dict[str, int] = {}
        self._endings: dict[str, tuple[str, str]] = {}  # → projection and part
        self._start = "\0"  # of names of the last layer: none, so far
        self._last = LayerTensors()

    def take(self, name: str, ref: TensorRef) -> bool:
        """Store a tensor whose name matches the family; return True if it was stored."""
        if name.startswith(self._start):
            word, _, ending = name[len(self._start) :].partition(".")
            place = self._endings.get(ending)
            index = self._indices.get(word)
            if place is not None and index is not None:
                self._store(index, *place, ref)
                return True
        matched = self._match(name)
        if matched is None:
            return False
        layer, word, projection, part, *stack = matched.groups()
        found = self.layers.setdefault(layer, LayerTensors())
        if word is None:
            found.stacks.setdefault(stack[0], {})[stack[1] or "weight"] = ref
            return True
        self._start = f"{layer}."
        self._last = found
        self._indices[word] = int(word)
        self._endings[f"{projection}.{part}"] = (projection, part)
        self._store(int(word), projection, part, ref)
        return True

    def _store(self, expert: int, projection: str, part: str, ref: TensorRef) -> None:
        layer = self._last
        roles = layer.experts.setdefault(expert, {})
        for role in self._roles[projection]:
            first = roles.setdefault(role, {}).setdefault(part, ref)
            if first is not ref:
                raise contradiction(
                    f"An expert of {self._start[:-1]} has a projection twice.",
                    ref.name,
                    "gate and up apart or in one tensor",
                    f"also {first.name}",
                    TWICE,
                )
            name = layer.projection_names.setdefault(role, projection)
            if name != projection:
                expected = f"{name}, as in the layer's other experts"
                raise contradiction(
                    "The experts of a layer have different names for a projection.",
                    ref.name,
                    expected,
                    projection,
                    TWICE,
                )


@dataclass(frozen=True)
class ExpertMap:
    """Use of every tensor of a checkpoint: each is in exactly one of `converted`, `copied`, `dropped`.

    declared: what the checkpoint's quantization config says of each module.
    """

    family: str
    chosen_because: str
    layers: tuple[MoeLayer, ...]
    converted: dict[str, str]
    copied: tuple[str, ...]
    dropped: dict[str, str]
    left: tuple[str, ...] = ()  # layers whose tensors are copied as they are
    # groups of linear layers that are quantized, and those that could be
    linear: tuple[MoeLayer, ...] = ()
    left_linear: tuple[MoeLayer, ...] = ()
    unknown_linear: tuple[str, ...] = ()  # weights that may be of linear layers
    is_own_row: bool = True  # False where no row names the model_type, and another one's names fit
    declared: DeclaredFormats = field(default=DeclaredFormats("none"), repr=False, compare=False)

    def with_input_scales(self, names: Collection[str]) -> ExpertMap:
        """Return the map with the activation scales of some layers converted, which are dropped otherwise."""
        layers = [layer for layer in self.layers if layer.name in names]
        moved = {name: layer.name for layer in layers for name in layer.input_scales.names}
        dropped = {name: reason for name, reason in self.dropped.items() if name not in moved}
        return replace(self, converted={**self.converted, **moved}, dropped=dropped)

    def with_linear(self, groups: Sequence[MoeLayer], left: Iterable[MoeLayer]) -> ExpertMap:
        """Return the map with the weights of linear groups converted; those of `left` are copied, as all otherwise."""
        moved = {name: group.name for group in groups for name in group.tensor_names()}
        return replace(
            self,
            linear=tuple(groups),
            left_linear=tuple(left),
            converted={**self.converted, **moved},
            copied=tuple(name for name in self.copied if name not in moved),
        )

    def without(self, names: Collection[str], order: Iterable[str]) -> ExpertMap:
        """Return the map with the tensors of some layers copied, in the source's `order` of all tensors.

        Raises RequestError if no layer is left to convert, and for sources whose experts are no tensors to copy.
        """
        layers_left = [layer for layer in self.layers if layer.name in names]
        for layer in layers_left:
            if layer.format.of("w2").encoding in KNOWN_BY_SOURCE:
                raise RequestError(
                    "Experts can be left as they are in a checkpoint only, not in an artifact or GGUF files.",
                    where=layer.name,
                    remedy="Convert the original checkpoint.",
                )
        if len(layers_left) == len(self.layers):
            raise RequestError(
                "All experts would be left as they are: nothing to convert.", where="overrides"
            )
        # Copied in full: tensors that a conversion would not need, such as scales of activations, are copied with them.
        within = tuple(f"{layer.name}." for layer in layers_left)
        moved = {name for name, layer in self.converted.items() if layer in names}
        moved |= {name for name in self.dropped if name.startswith(within)}
        copied = moved.union(self.copied)
        return replace(
            self,
            layers=tuple(layer for layer in self.layers if layer.name not in names),
            converted={name: at for name, at in self.converted.items() if name not in moved},
            copied=tuple(name for name in order if name in copied),
            dropped={name: reason for name, reason in self.dropped.items() if name not in moved},
            left=(*self.left, *(layer.name for layer in layers_left)),
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
    candidates = [name for name, ref in tensors.items() if looks_like_expert(name, len(ref.shape))]
    choice = choose_family(candidates, config, text)
    family = choice.family
    because = choice.because
    text = family.config_values(text)
    candidates = [name for name in candidates if not name.startswith(family.other_models)]
    declared = declared_formats(quantization, text)
    found, unmatched = _tensors_by_layer(family, tensors)
    if unmatched:
        raise unmatched_error(InputError, family, unmatched, because)
    if not found:
        raise RequestError(
            "No MoE experts were found by the names of tensors: nothing to convert.",
            expected=f"tensors such as {family.example()} ({because})",
            found=plural(len(tensors), "tensor"),
            remedy="Convert a whole Mixture-of-Experts checkpoint, and check model_type in config.json; a new naming "
            "needs a row in hqconv/models/families.py.",
        )
    _check_one_module(found)
    indices = layer_indices(family, found, text)
    dropped = _drop_zero_experts(family, found, indices, text)
    activation, origin = named_activation(choice, text)

    def remedy_of(module: str) -> str:
        matrices = (ref for ref in tensors.values() if len(ref.shape) > 1)
        return declared.remedy(
            module, is_left_over=all(ref.dtype in (*FLOATS, "I64", "BOOL") for ref in matrices)
        )

    layers = []
    for name in sorted(found, key=lambda name: (indices[name], name)):
        # a layer has them in less memory
        index = indices[name]
        own_tensors = found.pop(name)
        own_text = layer_config(family, index, text)
        facts = {
            "index": index,
            "activation": activation_of(choice, activation, index, own_text),
            "top_k": top_k(family, name, index, own_text),
        }
        format_of = _formats(declared, family, name, own_tensors, is_draft(family, index, text))
        sizes = config_sizes(family, index, own_text)
        layer, unused = build_layer(family, name, own_tensors, sizes, format_of, remedy_of, facts)
        layers.append(layer)
        dropped |= unused
    converted = {name: layer.name for layer in layers for name in _names(layer)}
    copied = tuple(name for name in tensors if name not in converted and name not in dropped)
    refuse_leftovers(copied)
    _check_one_prefix([*(layer.name for layer in layers), *copied])
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
        declared=declared,
    )


def _check_one_module(layers: Iterable[str]) -> None:
    """Check that no decoder layer has experts under two paths."""
    found: dict[str, str] = {}
    for name in layers:
        first = found.setdefault(decoder_layer(name), name)
        if first != name:
            raise contradiction(
                "A layer has its experts twice.",
                name,
                "one module of experts",
                f"also {first}",
                TWICE,
            )


def _check_one_prefix(names: Iterable[str]) -> None:
    """Check that the decoder's layers lie under one path: `model.layers` or `model.language_model.layers`, not both."""
    found: dict[str, str] = {}
    for name in names:
        stack = decoder_stack(name)
        first = found.setdefault(without_wrappers(stack), name)
        if stack and not first.startswith(f"{stack}."):
            remedy = (
                "Rename the tensors to the names of the model's class, or save the model again."
            )
            raise contradiction(
                "Layers of the decoder lie under two prefixes: a server loads those of one.",
                name,
                "one prefix for all layers",
                f"also {first}",
                remedy,
            )


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
    is_plain = all(map(_are_floats, found.modules()))  # as no quantized format is
    if is_extra and is_plain:
        return lambda _module: PLAIN
    if declared.method == "humming":
        return _humming_formats(
            declared, family.spelled(found.projection_names, found.stacks), layer
        )
    if declared.method == "none" and family.name == "inkling2":
        formats = {
            f"{layer}.{stack}": undeclared_format(refs) for stack, refs in found.stacks.items()
        }
        return lambda module: formats.get(module, PLAIN)
    plain = set() if declared.undecided is None else _plain_modules(found)
    modules = [f"{layer}.0.{name}" for name in found.projection_names.values()]
    modules += [f"{layer}.{stack}" for stack in found.stacks]

    def lookup(named: Callable[[str], str]) -> Callable[[str], SourceFormat]:
        if named is str and not plain:
            return declared.of
        return lambda module: declared.of(named(module), is_stored_plain=module in plain)

    own = lookup(str)
    is_own_meant = all(own(module).is_float for module in modules) == is_plain
    if is_own_meant or (not is_plain and any(map(declared.leaves_out, modules))):
        return own

    def is_meant(named: Callable[[str], str]) -> bool:
        if is_plain:
            return all(declared.leaves_out(named(module)) for module in modules)
        return not all(declared.of(named(module)).is_float for module in modules)

    return next((lookup(named) for named in _namings(family, layer) if is_meant(named)), own)


def _humming_formats(
    declared: DeclaredFormats, family: Family, layer: str
) -> Callable[[str], SourceFormat]:
    """Return the lookup where rules name the experts module, as vLLM does, or one module of one expert."""
    layer_format = declared.of(layer)
    roles = {f".{name}": role for role, name in family.projections.items()}

    def format_of(module: str) -> SourceFormat:
        fmt = layer_format
        if not fmt.is_float:
            fmt = declared.of_single(module) or fmt
        return fmt.of(next((roles[end] for end in roles if module.endswith(end)), "w13"))

    return format_of


def _namings(family: Family, layer: str) -> Iterator[Callable[[str], str]]:
    """Yield how a config may name a layer's modules otherwise than its tensors are: by other spellings of the family.

    Some tools give their configs the names of transformers' classes, and the tensors those of the release.
    """
    number = decoder_layer(layer).rstrip(".").rpartition(".")[2]
    paths = [
        path.format(layer=number) for path in family.paths if ("mtp" in path) == ("mtp" in layer)
    ]
    for path, spelling in itertools.product([layer, *paths], family.spellings):
        respelled = {
            name: spelling[role]
            for names in family.spellings
            for role, name in names.items()
            if role in spelling
        }

        def named(module: str, path: str = path, names: Mapping[str, str] = respelled) -> str:
            before, _, name = module.removeprefix(layer).rpartition(".")
            return f"{path}{before}.{names.get(name, name)}"

        yield named


def _are_floats(refs: TensorRefs) -> bool:
    return all(
        part in ("weight", "bias") and ref.dtype in FLOATS
        for part, ref in refs.items()
        if part not in UNUSED_PARTS
    )


def _plain_modules(found: LayerTensors) -> set[str]:
    """Return the paths of a layer's modules whose tensors are all plain floats."""
    plain = (next(iter(refs.items())) for refs in found.modules() if _are_floats(refs))
    return {ref.name.removesuffix(f".{part}") for part, ref in plain}


def _drop_zero_experts(
    family: Family, layers: Mapping[str, LayerTensors], indices: Mapping[str, int], text: Config
) -> dict[str, str]:
    """Remove identity experts, E..E+Z-1, from layers; transformers 5 writes gate and up for them.

    In a stack they are its end, which no byte range of an expert reaches.
    """
    dropped: dict[str, str] = {}
    for name, layer in layers.items():
        count = config_number(text, family.num_experts_keys, indices[name])
        zeros = config_number(text, family.zero_experts_keys, indices[name])
        if count is None or zeros is None:
            continue
        total = count[1] + zeros[1]
        for expert in [expert for expert in layer.experts if count[1] <= expert < total]:
            if "w2" in layer.experts[expert]:
                continue
            reason = f"expert {expert} is a zero-expert ({zeros[0]} {zeros[1]}): an identity, its weights are unused"
            for refs in layer.experts.pop(expert).values():
                dropped |= {ref.name: reason for ref in refs.values()}
        for refs in layer.stacks.values():
            for part, ref in refs.items():
                if ref.shape and ref.shape[0] == total:
                    num_bytes = ref.num_bytes // total * count[1]
                    shape = (count[1], *ref.shape[1:])
                    refs[part] = ref._replace(shape=shape, num_bytes=num_bytes)
    return dropped
