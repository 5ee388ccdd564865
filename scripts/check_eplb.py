"""EPLB on the GPUs of this machine: experts move between ranks, and the answers stay.

    python scripts/check_eplb.py --work DIR [--schemas mxfp4,int4-g64-zp] [--ranks 2] [--copies 2] [--out FILE]

For each schema three engines with expert parallelism serve one model: without EPLB, with vLLM's EPLB between steps
(`sync`), and beside them (`async`). Each is asked again while experts move (`--rounds`); vLLM's own map must have
changed. Once the model takes one expert for a token, once four (`--top-ks`). With one expert an answer is one product,
wherever the expert is: tokens and log-probabilities must be the same, bit for bit. With several, each rank adds its
own experts before the ranks' sums are added: another place of an expert is another order of additions. Then tokens
must be the same, or their log-probabilities as near as in the control: stock vLLM with the 16-bit source, without EPLB
and with it. Engines have `VLLM_BATCH_INVARIANT=1` (`--variables`). Needs vLLM and GPUs of the target.

`--one-gpu` puts all ranks on one GPU. `--dry-run` converts, and prints the engines that would start: for a machine
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from scripts import few_kernels, one_gpu
from scripts.engines import Engine, run_all
from scripts.serving_answers import GOOD, NOISE, verdict, write
from scripts.shared import make_source

# An engine that is asked in rounds of 48 steps moves its experts at least once in each.
EVERY_STEPS = 32
ASKING = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for maps
WITHOUT = "without EPLB"
CONTROL = "bf16 of stock vLLM"  # in place of a schema


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for models, on a RAM disk")
    parser.add_argument("--schemas", type=lambda text: text.split(","), default=["mxfp4", "int4-g64-zp"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU (scripts/one_gpu.py)")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once")
    parser.add_argument("--copies", type=int, default=2, help="redundant experts")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-ks", type=_numbers, default=[1, 4], help="experts a token, of each model")
    parser.add_argument("--rounds", type=int, default=3, help="questions while experts move")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["sync", "async"])
    parser.add_argument("--words", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--variables", type=json.loads, default={"VLLM_BATCH_INVARIANT": "1"}, help="of engines")
    parser.add_argument("--device", default="auto", help="of the conversions")
    parser.add_argument("--dry-run", action="store_true", help="convert, and print the engines")
    parser.add_argument("--out", type=Path, help="write the report there as JSON")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    few_kernels.use(a.work)  # fewer to compile
    if a.one_gpu:
        one_gpu.use(a.work)
    report: dict[str, Any] = {"failed": False, "cases": {}}
    for name, case in cases(a):
        report["cases"][name] = case
        report["failed"] |= not case["good"]
        print(name, case, flush=True)
        if a.out:
            write(a.out, report)
    print(said := verdict(report), flush=True)
    sys.exit(said != GOOD)


def cases(a: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """All engines: what each is called, and how it compares with that of the same model without EPLB."""
    kinds = [(k, x) for k in a.top_ks for x in ([] if k == 1 else [CONTROL]) + a.schemas]
    groups = {(top_k, x): list(engines_of(a, x, top_k)) for top_k, x in kinds}
    if a.dry_run:
        for (top_k, schema), engines in groups.items():
            for engine in engines:
                case = {"good": True, "folder": str(engine.model), "arguments": " ".join(engine.arguments)}
                yield f"{schema}, top {top_k}, {engine.name}", case
        return
    found: dict[int, dict[str, Any]] = {}
    waiting = list(groups)
    controls: dict[int, dict[str, Any]] = {}
    for engine, answers in run_all([engine for engines in groups.values() for engine in engines], a.jobs):
        found[id(engine)] = answers
        while waiting and all(id(one) in found for one in groups[waiting[0]]):
            top_k, schema = waiting.pop(0)
            plain, *others = groups[top_k, schema]
            judged = {
                one.name: compared(found[id(plain)], found[id(one)], top_k, controls.get(top_k))
                for one in (plain, *others)
            }
            yield from ((f"{schema}, top {top_k}, {name}", case) for name, case in judged.items())
            if schema == CONTROL:
                controls[top_k] = furthest(judged.values())


def furthest(cases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The largest distance of some engines, and which rounds had the same tokens in all of them."""
    found = [case for case in cases if "log_p" in case]
    return {
        "log_p": max((case["log_p"] for case in found), default=0.0),
        "same_tokens": [all(case["same_tokens"]) for case in found],
    }


def compared(
    plain: dict[str, Any], found: dict[str, Any], top_k: int, control: dict[str, Any] | None
) -> dict[str, Any]:
    """One engine's case; why there is none, where it or the one without EPLB did not start."""
    if "failed" in found or "failed" in plain:
        return {"good": False, "why": found.get("failed", "nothing to compare with")}
    return judge(plain, found, is_exact=top_k == 1, control=control)


def engines_of(a: argparse.Namespace, schema: str, top_k: int) -> Iterator[Engine]:
    """Engines over one source: its artifact without copies, and that with copies, served in each of the ways.

    CONTROL in place of a schema: the source itself, served by vLLM alone.
    """
    source = a.work / f"source-top{top_k}"
    if not source.exists():
        sizes = {key: getattr(a, key) for key in ("hidden", "intermediate", "layers", "experts")}
        make_source(source, **sizes, top_k=top_k)
    arguments = ["--tp", str(a.ranks), "--ep"]
    for name, copies in ((WITHOUT, 0), *((f"EPLB {way}", a.copies) for way in a.ways)):
        out = source if schema == CONTROL else a.work / f"{schema}-top{top_k}-copies{copies}"
        if not out.exists():
            words = {"ep": a.ranks, "redundant_experts": copies, "device": a.device}
            hqconv.convert(source, out, schema=schema, target="sm90", **words)
        words = one_gpu.words_of(a.words) if a.one_gpu else dict(a.words)
        more = []
        if name != WITHOUT:
            words |= {"enable_eplb": True, "eplb_config": eplb_config(name.split()[1], copies, a.one_gpu)}
            more = ["--eplb-rounds", str(a.rounds)]
        yield Engine(name, out, [*arguments, *more, "--words", json.dumps(words)], {**ASKING, **a.variables})


def eplb_config(way: str, copies: int, is_one_gpu: bool) -> dict[str, Any]:
    """vLLM's `EPLBConfig`, with moves after so few steps that every round has one."""
    steps: dict[str, Any] = {"step_interval": EVERY_STEPS, "window_size": EVERY_STEPS}
    steps |= {"communicator": one_gpu.COMMUNICATOR} if is_one_gpu else {}
    return {**steps, "num_redundant_experts": copies, "use_async": way == "async"}


def judge(
    plain: dict[str, Any], found: dict[str, Any], *, is_exact: bool, control: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How one engine's answers, in all rounds, compare with those without EPLB; good: as the text of this module says.

    control: the case of a stock engine; None for the stock engine itself, whose tokens are not judged.

    moved: how many places of experts, of all layers, have another expert than at the round before, by round.
    """
    rounds = [found["answers"], found["again"], *found.get("rounds", [])]
    tokens = [_tokens(answers) == _tokens(plain["answers"]) for answers in rounds]
    bits = [answers == plain["answers"] for answers in rounds]
    case: dict[str, Any] = {"same_tokens": tokens, "same_bits": bits}
    case["log_p"] = max(_distance(answers, plain["answers"]) for answers in rounds)
    is_good = all(bits) if is_exact else control is None or all(tokens) or _is_near(case, control)
    if "maps" in found:
        maps = found["maps"]
        case["ranks_agree"] = all(ranks.count(ranks[0]) == len(ranks) for ranks in maps)
        case["moved"] = [_moved(old[0], new[0]) for old, new in pairwise(maps)]
        case["moved_before"] = _moved(_first_map(maps[0][0]), maps[0][0])
        is_good &= case["ranks_agree"] and case["moved_before"] + sum(case["moved"]) > 0
    return {"good": is_good, **case}


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _is_near(case: dict[str, Any], control: dict[str, Any]) -> bool:
    is_near: bool = case["log_p"] <= NOISE * control.get("log_p", 0.0)
    return is_near and not all(control["same_tokens"])


def _tokens(answers: list[list[list[float]]]) -> list[list[float]]:
    return [[token for token, _ in answer] for answer in answers]


def _distance(answers: list[list[list[float]]], others: list[list[list[float]]]) -> float:
    """The largest difference of log-probabilities before the first token that differs."""
    largest = 0.0
    for left, right in zip(answers, others, strict=True):
        for (token, log_p), (other, other_p) in zip(left, right, strict=True):
            if token != other:
                break
            largest = max(largest, abs(log_p - other_p))
    return largest


def _moved(old: list[list[int]], new: list[list[int]]) -> int:
    return sum(a != b for left, right in zip(old, new, strict=True) for a, b in zip(left, right, strict=True))


def _first_map(places: list[list[int]]) -> list[list[int]]:
    """The map that an engine starts with: all experts, and copies of the first."""
    num_experts = 1 + max(max(layer) for layer in places)
    return [[place % num_experts for place in range(len(layer))] for layer in places]


if __name__ == "__main__":
    main()
