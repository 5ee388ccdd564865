"""Compare quantized experts with a model's own by questions: accuracy, flips, and the divergence on worked answers.

    python scripts/tasks.py MODEL OUT … --choices choices.jsonl --worked gsm8k-test.jsonl [--device cuda]

MODEL is a 16-bit model of the Mixtral or Qwen3-MoE classes, each OUT an artifact or a checkpoint of another package.
A line of CHOICES has `suite`, `question`, `choices` and `answer` (an index); a `_` alone in the question stands for the
choice. The answer is the choice with the largest log-probability per byte. A flip is a question whose answer is
another one than the model's: flips show damage that accuracy averages away. A line of WORKED has `question` and
`answer`; the divergence is the mean over the answers' tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.peers import load

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Example:
    """Tokens of a text, and the index of the first one that counts. num_bytes: of these."""

    ids: list[int]
    first: int
    num_bytes: int


def example(tokenizer: Any, context: str, answer: str) -> Example:
    """Tokenize a context and its answer."""
    ids = tokenizer(context + answer)["input_ids"]
    before = tokenizer(context)["input_ids"]
    first = next(
        (i for i, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), len(before)
    )
    return Example(ids, max(first, 1), len(answer.encode()))


def examples_of(tokenizer: Any, question: dict[str, Any]) -> list[Example]:
    """Return an example for each choice."""
    text, choices = question["question"], question["choices"]
    around_blank = re.split(r"(?<=\s)_(?=\W)", text, maxsplit=1)
    if len(around_blank) == 2:
        before, after = around_blank
        return [example(tokenizer, "", before + choice + after) for choice in choices]
    return [example(tokenizer, f"Question: {text}\nAnswer:", f" {choice}") for choice in choices]


def batches(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Yield indices of examples of about the same length."""
    batch: list[int] = []
    for index in sorted(
        range(len(examples)), key=lambda i: (len(examples[i].ids), examples[i].first)
    ):
        if batch and len(examples[index].ids) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def log_probabilities(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    """Return the log-probabilities [B, T, V] of the tokens behind `start_of` these examples."""
    ids = padded(examples).to(model.device)
    kept = ids.size(1) - start_of(examples) + 1
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
    return logits[:, :-1].log_softmax(-1)


def start_of(examples: Sequence[Example]) -> int:
    """Return the first token that counts in any example."""
    return min(one.first for one in examples)


def padded(examples: Sequence[Example]) -> torch.Tensor:
    """Return the tokens [B, T], with zeros behind those of shorter examples, which change nothing before them."""
    ids = torch.zeros(len(examples), max(len(one.ids) for one in examples), dtype=torch.int64)
    for row, one in zip(ids, examples, strict=True):
        row[: len(one.ids)] = torch.tensor(one.ids)
    return ids


def is_answer(examples: Sequence[Example]) -> torch.Tensor:
    """Return which tokens behind `start_of` these examples count, bool [B, T]."""
    first, end = (
        torch.tensor(numbers)[:, None]
        for numbers in ([one.first for one in examples], [len(one.ids) for one in examples])
    )
    places = torch.arange(start_of(examples), int(end.max()))
    return (places >= first) & (places < end)


def answers(model: Any, questions: Sequence[Sequence[Example]]) -> list[int]:
    """Return the index of the chosen choice of each question."""
    examples = [one for question in questions for one in question]
    scores = torch.zeros(len(examples), dtype=torch.float64)
    for batch in batches(examples):
        some = [examples[index] for index in batch]
        wanted = padded(some)[:, start_of(some) :, None].to(model.device)
        found = log_probabilities(model, some).gather(2, wanted)[:, :, 0].double().cpu()
        num_bytes = torch.tensor([one.num_bytes for one in some])
        scores[batch] = torch.where(is_answer(some), found, 0.0).sum(1) / num_bytes
    of_question = torch.split(scores, [len(question) for question in questions])
    return [int(choices.argmax()) for choices in of_question]


def divergences(
    base: Any, models: Sequence[Any], examples: Sequence[Example]
) -> list[tuple[float, float]]:
    """Return each model's mean KL divergence from `base` over the examples, and its standard error."""
    means = torch.zeros(len(models), len(examples), dtype=torch.float64)
    for batch in batches(examples):
        some = [examples[index] for index in batch]
        wanted, counts = log_probabilities(base, some), is_answer(some)
        for row, model in zip(means, models, strict=True):
            found = log_probabilities(model, some)
            each = (wanted.exp() * (wanted - found)).sum(-1).double().cpu()
            row[batch] = torch.where(counts, each, 0.0).sum(1) / counts.sum(1)
    return [(float(row.mean()), float(row.std() / math.sqrt(len(row)))) for row in means]


def share(flags: Sequence[bool]) -> str:
    """Return a share in percent, with its standard error."""
    mean = sum(flags) / len(flags)
    return f"{100 * mean:.1f} ± {100 * math.sqrt(mean * (1 - mean) / len(flags)):.1f}"


def main() -> None:
    """Print a table for each suite."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("outs", type=Path, nargs="*")
    parser.add_argument("--choices", type=Path, required=True)
    parser.add_argument("--worked", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take one line of so many")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines, problems = (
        [json.loads(line) for line in path.read_text().splitlines()][:: args.every]
        for path in (args.choices, args.worked)
    )
    questions = [examples_of(tokenizer, line) for line in lines]
    worked = [
        example(tokenizer, f"Question: {line['question']}\nAnswer:", f" {line['answer']}")
        for line in problems
    ]
    with torch.inference_mode():
        base = load(args.model, device=args.device)
        of_base = answers(base, questions)
        models = [load(args.model, out, args.device) for out in args.outs]
        figures = [(0.0, 0.0), *divergences(base, models, worked)]
        for out, model, (mean, error) in zip(
            [args.model, *args.outs], [base, *models], figures, strict=True
        ):
            found = of_base if model is base else answers(model, questions)
            right, flips = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
            for line, choice, before in zip(lines, found, of_base, strict=True):
                for suite in (line["suite"], "all"):
                    right[suite].append(choice == line["answer"])
                    flips[suite].append(choice != before)
            print(f"{out}: KL on worked answers {mean:.5f} ± {error:.5f}")
            for suite in sorted(right):
                print(f"  {suite}: accuracy {share(right[suite])} %, flips {share(flips[suite])} %")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
