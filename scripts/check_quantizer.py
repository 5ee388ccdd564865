"""Compare the quantizers mse and gptq on the CPU and on a GPU, bit for bit, and measure what they cost on the GPU.

    python scripts/check_quantizer.py [--schemas mxfp4,int4-g64-zp] [--experts 16] [--only-speed [--device cpu]]
                                       [--log FILE.md]

Needs a CUDA device, but for `--only-speed --device cpu`. Every schema, both parameter dtypes, sources in bfloat16 and
float32, hard and plain matrices, with and without importance. Exit 1 on any difference. With --only-speed nothing is
compared.
Speed: gate and up of some experts of 2048 x 4096 in bfloat16, median of five runs after one, for rtn, mse and gptq.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hqconv.quantization.gptq import hessian_factors
from hqconv.quantization.quantize import quantize_stacks
from hqconv.quantization.quantized import RTN, QuantizedStack, Quantizer
from hqconv.schemas.weight_schema import WeightSchema
from scripts.shared import SCHEMAS
from tests.make.matrices import RARE_SCHEMAS, any_schema, hard_matrix
from tests.make.structured_inputs import as_tiles, structured_inputs

SHAPE = (128, 768)


def stacks_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Gate and up of three experts: hard ones, and a plain one."""
    plain = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1)) * 0.02
    return [
        torch.stack([hard_matrix(*SHAPE, dtype, 10 * i), hard_matrix(*SHAPE, dtype, 10 * i + 1), plain[i].to(dtype)])
        for i in range(2)
    ]


def differences(ours: list[QuantizedStack], theirs: list[QuantizedStack]) -> list[str]:
    """Names of tensors and sums that are not the same bits; NaN equals NaN."""
    wrong = []
    for one, other in zip(ours, theirs, strict=True):
        for name, tensor in one.tensors.items():
            if not torch.equal(tensor.view(torch.uint8), other.tensors[name].cpu().view(torch.uint8)):
                wrong.append(name)
        if not torch.equal(one.error.nan_to_num(-1), other.error.cpu().nan_to_num(-1)):
            wrong.append("error")
    return wrong


def gptq(schema: WeightSchema, num_columns: int) -> Quantizer:
    """The quantizer gptq by some correlated inputs."""
    x = structured_inputs(1000, num_columns, 0)
    tiles = as_tiles(x.T @ x / len(x)).numpy().tobytes()
    factors = hessian_factors(tiles, num_columns, schema.weight_scale_group_size, schema.rotation)
    return Quantizer("gptq", factors.importance, factors)


def compare(schema: WeightSchema) -> list[str]:
    """What differs between the devices."""
    wrong = []
    importance = (torch.arange(SHAPE[1]) % 7).float()
    quantizers = {"plain": Quantizer("mse"), "weighted": Quantizer("mse", importance), "gptq": gptq(schema, SHAPE[1])}
    for dtype, param, (name, quantizer) in itertools.product(
        (torch.bfloat16, torch.float32), ("bfloat16", "float16"), quantizers.items()
    ):
        stacks = stacks_of(dtype)
        expected = quantize_stacks(stacks, schema, param, quantizer=quantizer)
        found = quantize_stacks([s.cuda() for s in stacks], schema, param, quantizer=quantizer)
        wrong += [f"{dtype}, {param}, {name}: {what}" for what in differences(expected, found)]
    return wrong


def seconds(work: Callable[[], object]) -> float:
    """Median of five runs, after one."""
    runs = []
    for _ in range(6):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        runs.append(time.perf_counter() - started)
    return sorted(runs[1:])[2]


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(schema: WeightSchema, num_experts: int, device: str) -> list[float]:
    """GB/s of the bfloat16 source, by rtn, mse and gptq."""
    stacks = list(torch.randn(2, num_experts, 2048, 4096, device=device).bfloat16())
    num_bytes = sum(stack.numel() * 2 for stack in stacks)
    return [
        num_bytes / 1e9 / seconds(lambda q=quantizer: quantize_stacks(stacks, schema, "bfloat16", quantizer=q))  # type: ignore[misc]
        for quantizer in (RTN, Quantizer("mse"), gptq(schema, 4096))
    ]


def main() -> None:
    """Compare everything and print a table; exit 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", default=",".join((*SCHEMAS, *RARE_SCHEMAS)))
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--only-speed", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="for --only-speed")
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    rows, failed = [], 0
    for name in args.schemas.split(","):
        schema = any_schema(name)
        wrong = [] if args.only_speed else compare(schema)
        failed += len(wrong)
        rtn, mse, compensated = speed(schema, args.experts, args.device)
        verdict = wrong[0] if wrong else "not compared" if args.only_speed else "same bits"
        rows.append(f"| `{name}` | {verdict} | {rtn:.3g} | {mse:.3g} | {mse / rtn:.2f} | {compensated:.3g} |")
        print(rows[-1], flush=True)
    if args.log:
        where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
        head = f"{where}, torch {torch.__version__}\n\n"
        head += f"| schema | CPU and GPU | rtn, GB/s | mse, GB/s | mse of rtn | gptq, GB/s |\n{'| --- ' * 6}|\n"
        args.log.write_text(head + "\n".join(rows) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
