"""`hqconv allocate`: the best mixture of a small uneven model, and a recipe that converts to what was promised."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import hqconv
from hqconv.conversion.allocate import GemmChoice, choose
from hqconv.errors import RequestError
from hqconv.schemas.options import load_recipe
from tests.make import command
from tests.make.conversions import assert_verified, manifest
from tests.make.decodable import write_quantized
from tests.make.families import moe_layers, save_family
from tests.make.tokenizer import write_tokenizer
from tests.make.uneven import text_of, write_uneven

COMMON: dict[str, Any] = {"target": "sm90", "device": "cpu", "threads": 2}
LONG: dict[str, Any] = {"calibrate_tokens": 4096, "calibrate_context": 64}
SMALL: dict[str, Any] = {"calibrate_tokens": 48, "calibrate_context": 16}
DOCUMENTS = Path(__file__).parents[2] / "docs" / "ci.md"
PAIR = ("int3-g32", "int4-g32")
GEMMS = ("w13", "w2")
SIZES = (0.2, 1, 0.4, 2)  # of the experts' outputs, by layer


def allocate(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    return hqconv.allocate(
        folder / "src", out, **{**COMMON, "calibrate": folder / "text", **options}
    )


# --- the choice


OPTIONS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 50)), min_size=1, max_size=5)
GEMMS_OF = st.lists(OPTIONS, min_size=1, max_size=5)


def choices_of(*gemms: list[tuple[int, int]]) -> list[GemmChoice]:
    """A choice for each GEMM, of candidates (bytes, loss)."""
    return [
        GemmChoice(
            str(number),
            "w13",
            {str(index): cost for index, (cost, _) in enumerate(options)},
            {str(index): float(loss) for index, (_, loss) in enumerate(options)},
        )
        for number, options in enumerate(gemms)
    ]


def chosen_of(gemms: list[list[tuple[int, int]]], budget: int) -> list[tuple[int, float]]:
    """Bytes and loss of each GEMM's chosen candidate."""
    choose(choices := choices_of(*gemms), budget, 1)
    return [(choice.sizes[choice.chosen], choice.losses[choice.chosen]) for choice in choices]


def largest_step(options: list[tuple[int, int]]) -> int:
    """The largest gain of one step along the lower convex hull."""
    best, largest = min(options), 0
    while better := [one for one in options if one[1] < best[1]]:
        step = max(better, key=lambda one: ((best[1] - one[1]) / (one[0] - best[0]), -one[0]))
        largest, best = max(largest, best[1] - step[1]), step
    return largest


@given(GEMMS_OF, st.integers(0, 80))
def test_a_choice_loses_less_than_one_step_above_the_best(
    gemms: list[list[tuple[int, int]]], more: int
) -> None:
    every = [
        (sum(cost for cost, _ in one), sum(loss for _, loss in one))
        for one in itertools.product(*gemms)
    ]
    budget = min(cost for cost, _ in every) + more
    best = min(loss for cost, loss in every if cost <= budget)
    chosen = chosen_of(gemms, budget)
    assert sum(size for size, _ in chosen) <= budget
    loss = sum(loss for _, loss in chosen)
    assert loss == best or loss - best < max(map(largest_step, gemms))


def test_the_rest_of_a_budget_is_used() -> None:
    """The second step does not fit; a cheaper candidate off the hull, and a step of another GEMM, do."""
    gemms = [[(1, 100), (11, 40), (26, 35), (31, 0)], [(1, 10), (6, 9)]]
    for budget, expected in ((31, [26, 1]), (26, [11, 6]), (37, [31, 6])):
        assert [size for size, _ in chosen_of(gemms, budget)] == expected


def test_a_budget_that_is_too_small_names_the_least_that_works() -> None:
    with pytest.raises(RequestError, match="too small") as error:
        choose(choices_of([(7, 1)], [(9, 1)]), 15, 100)
    assert (
        error.value.expected == "at least 16 bytes of the experts' tensors, or 1.28 bits a weight"
    )


# --- a whole model


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose four layers do not count alike, a text for the calibration and another one."""
    folder = tmp_path_factory.mktemp("uneven")
    write_uneven(folder / "src", SIZES)
    (folder / "text").write_text(text_of(0, 60))
    (folder / "held").write_text(text_of(600, 650))
    return folder


@pytest.fixture(scope="module")
def found(uneven: Path) -> dict[str, Any]:
    """An allocation with about the mean size of both candidates."""
    least = allocate(uneven, uneven / "any.toml", bits=64, candidates=PAIR, **SMALL)
    first, second = (least["uniform"][name]["size_bytes"] for name in PAIR)
    size = (3 * first + 5 * second) // 8  # no whole number of layers
    return allocate(uneven, uneven / "recipe.toml", size=size, candidates=PAIR, **LONG)


def converted(folder: Path, schema: str) -> dict[str, torch.Tensor]:
    """The decoded weights of the second layer in a calibrated conversion."""
    out = folder / schema
    hqconv.convert(folder / "src", out, schema=schema, calibrate=folder / "text", **COMMON, **LONG)
    weights = hqconv.dequantize(out, layer=list(manifest(out)["blocks"])[1])
    return {"w13": torch.cat([weights["w1"], weights["w3"]], 1), "w2": weights["w2"]}


def test_the_recipe_keeps_its_promise(found: dict[str, Any], uneven: Path) -> None:
    """The conversion has the schemas and the sizes of the chosen mixture, which loses less than a uniform schema."""
    out = uneven / "chosen"
    hqconv.convert(uneven / "src", out, config=uneven / "recipe.toml", device="cpu", threads=2)
    made, total = manifest(out), 0
    for layer, gemms in found["layers"].items():
        names = made["blocks"][layer].get("schema_name", made["schema_name"]).split("+")
        assert [gemms[gemm]["chosen"] for gemm in GEMMS] == [names[0], names[-1]]
        total += sum(gemms[gemm]["size_bytes"] for gemm in GEMMS)
    assert total == found["chosen"]["size_bytes"] <= found["budget"]["limit_bytes"]
    files = [one for path, one in made["files"].items() if path.startswith("experts/")]
    written = sum(one["size_bytes"] for one in files)
    assert total < written < total + 4096 * len(files)  # and headers
    assert_verified(out, uneven / "src")
    small, large = (found["uniform"][name] for name in PAIR)
    share = (total - small["size_bytes"]) / (large["size_bytes"] - small["size_bytes"])
    assert found["chosen"]["loss"] < 0.8 * (small["loss"] + share * (large["loss"] - small["loss"]))


def test_losses_are_those_of_the_outputs(found: dict[str, Any], uneven: Path) -> None:
    """Token by token with decoded conversions, where transformers computes what an expert gives."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        uneven / "src", dtype=torch.float32
    ).eval()
    ids = transformers.AutoTokenizer.from_pretrained(uneven / "src")((uneven / "text").read_text())[
        "input_ids"
    ]
    seen: list[Any] = []
    module, layer = moe_layers(model)[1][2], model.model.layers[1]
    module.register_forward_pre_hook(lambda _, args: seen.append(args))
    layer.register_forward_hook(
        lambda _, __, out: seen.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    with torch.no_grad():
        model(input_ids=torch.tensor(ids[:4096]).view(-1, 64), use_cache=False)
    (x, chosen, weights), hidden = seen
    name, schema = list(found["layers"])[1], PAIR[0]
    w13, w2 = module.gate_up_proj.detach(), module.down_proj.detach()
    other13 = converted(uneven, f"{schema}+int8")["w13"]
    other2 = converted(uneven, f"int8+{schema}")["w2"]  # of an almost exact w13: some other codes

    def down(e: int, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ first[e].t()).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up @ second[e].t()

    expected = torch.zeros(2, dtype=torch.float64)
    for e in range(len(w2)):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        own = down(e, x[token], w13, w2)
        shares = weights[token, choice].square() / hidden.flatten(0, 1)[token].square().sum(1)
        for number, changed in enumerate(((other13, w2), (w13, other2))):
            error = (down(e, x[token], *changed) - own).square().sum(1)
            expected[number] += (error * shares).double().sum()
    figures = [found["layers"][name][gemm]["candidates"][schema]["loss"] for gemm in GEMMS]
    assert figures == pytest.approx((expected / 4096).tolist(), rel=0.03)


# --- requests ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_family(folder / "src", "qwen3_moe", inner=64)
    write_tokenizer(folder / "src")
    (folder / "text").write_text(" ".join(str(3 + i * 7 % 60) for i in range(80)))
    return folder


def few(folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    return allocate(folder, out, **{**SMALL, "candidates": "int3-g32,int8", "bits": 64, **options})


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"candidates": "int4-g32,nonsense"}, "--candidates nonsense"),
        ({"candidates": "int4-g32,source"}, "--candidates source"),
        ({"candidates": "int4-g32,int4-g32+int8"}, "--candidates int4-g32+int8"),
        ({"candidates": "int4-g32,int4-g64", "tp": 2}, "--candidates int4-g64"),
        ({"candidates": "int4-g32,nvfp4", "input_schema": "int8"}, "--candidates nvfp4"),
        ({"bits": 1.0}, "--size, --bits"),
        ({"bits": None}, "--size, --bits"),
        ({"size": "1GB"}, "--size, --bits"),
        ({"calibrate": "/nowhere"}, "--calibrate /nowhere"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], where: str, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as error:
        few(small, tmp_path / "recipe.toml", **options)
    assert error.value.where.startswith(where)
    assert not list(tmp_path.iterdir())


def test_default_candidates_fit_or_are_left_out(small: Path, tmp_path: Path) -> None:
    found = few(small, tmp_path / "recipe.toml", candidates=None, tp=2, input_schema="fp8")
    candidates = found["uniform"].keys()
    assert {"int2-g32-zp", "fp8"} <= candidates
    assert not {"int3-g64", "int4-g16-e4m3"} & candidates  # 32 columns on each rank; no kernel
    assert load_recipe(tmp_path / "recipe.toml").options["input_schema"] == "fp8"


def test_a_quantized_source_may_keep_its_codes(tmp_path: Path) -> None:
    write_quantized(tmp_path / "src", "fp8", tmp_path / "plain")
    (tmp_path / "text").write_text(" ".join(str(3 + i * 7 % 60) for i in range(80)))
    document = few(tmp_path, tmp_path / "recipe.toml", candidates=None, bits=64)
    own = next(iter(document["uniform"]))
    assert own == "fp8-block"
    assert document["chosen"]["loss"] == document["uniform"][own]["loss"] == 0
    hqconv.convert(
        tmp_path / "src", tmp_path / "out", config=tmp_path / "recipe.toml", device="cpu"
    )
    assert {block["conversion"] for block in manifest(tmp_path / "out")["blocks"].values()} == {
        "direct"
    }


def test_paths_in_a_recipe_are_relative_to_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema of a file, and the text, are found from another folder. Experts are padded."""
    (tmp_path / "own.toml").write_text('b_dtype = "uint5"\nweight_scale_group_size = 32\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "text").write_bytes((small / "text").read_bytes())
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"candidates": "own.toml,int8", "calibrate": Path("text")}
    mixed = few(small, Path("recipes/recipe.toml"), **options)
    limit = sum(mixed["uniform"][name]["size_bytes"] for name in ("own.toml", "int8")) // 2
    document = few(small, Path("recipes/recipe.toml"), bits=None, size=limit, **options)
    chosen = {one["chosen"] for of in document["layers"].values() for one in of.values()}
    assert chosen == {"own.toml", "int8"}
    monkeypatch.chdir("/")
    hqconv.convert(
        small / "src", tmp_path / "out", config=tmp_path / "recipes" / "recipe.toml", device="cpu"
    )
    assert manifest(tmp_path / "out")["calibration"]["name"] == "text"


def test_the_command_prints_one_document(small: Path, tmp_path: Path) -> None:
    def call(*more: object) -> Any:
        return command.call(
            *("allocate", small / "src", "--candidates", "int3-g32,int8", "--target", "h200"),
            *("--calibrate", small / "text", "--calibrate-tokens", 48, "--calibrate-context", 16),
            *("--device", "cpu", "--bits", 64, "-o", tmp_path / "r.toml", *more),
        )

    done = call("--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    lines = DOCUMENTS.read_text().splitlines()
    row = next(line for line in lines if line.startswith("| `allocation`"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[3])) <= document.keys()
    assert {one["chosen"] for of in document["layers"].values() for one in of.values()} == {"int8"}
    shown = call()
    assert shown.exit_code == 0, shown.output
    assert f"--config {tmp_path / 'r.toml'}" in shown.stdout
    assert call("-q").output == ""
