"""A source's config, model class and tokenizer in transformers, without any code that the source holds or names.

transformers sees a folder of the process: config.json without the keys that name code, the tokenizer's files, and the
safetensors files that hqconv reads. So it finds no Python module, pickle or adapter of the source.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hqconv.errors import HqconvError, RequestError
from hqconv.io.checkpoint_files import has_tokenizer
from hqconv.models.source_protocol import Source
from hqconv.schemas.artifact_names import CONFIG
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_regular

_LOG = logging.getLogger(__name__)

MAX_TEXT_BYTES = 16 << 20  # of a text: all of it is cut into tokens
# Python modules of the folder, and implementations, which may be names of repos of the Hub.
_CODE_KEYS = re.compile(
    r"auto_map|custom_pipelines|use_kernels?|kernel_config"
    r"|_?(?:attn|attention|experts)_implementation(?:_internal)?"
)
_ATTENTION = (None, "eager", "sdpa")  # of transformers itself
_TOKENIZER_FILE = re.compile(
    r"(?:tokenizer|special_tokens_map|added_tokens|vocab|merges|tekken)[\w.-]*\.(?:json|txt|model)|[\w.-]+\.(?:model|tiktoken)"
    r"|chat_template\.jinja"
)
BUILTIN_TEXT = Path(__file__).with_name("builtin.txt")
LEAST_TOKENS = 2  # of a text, and of a sequence: the first one is not predicted
_BETWEEN = "\n\n\n"  # passages of BUILTIN_TEXT
_TURN = re.compile(r"^(System|User|Assistant|Tool): ", re.MULTILINE)
# Of a process that runs a chat template; its memory is beside what this process has.
_CHILD_SECONDS, _CHILD_BYTES = 60, 1 << 30
# Before a chat template: one that asks for the date gets this one, so that tokens do not depend on the day.
_DATE = "{% macro strftime_now(format) %}2026-01-01{% endmacro %}"


def import_transformers(what: str) -> Any:
    """Import transformers, which does `what`. Raises RequestError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise RequestError(
            f"{what} with transformers, which is not installed.",
            found=error,
            remedy="Run: pip install 'transformers>=5.0'.",
        ) from error
    return transformers


@contextmanager
def running(model: str) -> Iterator[None]:
    """Turn every error of transformers about a model, its config or its tokenizer into a RequestError."""
    import torch

    try:
        yield
    except (HqconvError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RequestError(
            "The transformers library cannot run this model.",
            where=model,
            found=f"{type(error).__name__}: {str(error).strip()}".split("\n")[0],
            remedy="Try it with transformers alone, without trust_remote_code: this command runs models that "
            "transformers 5 has the code of.",
        ) from error


@contextmanager
def quiet_loading(transformers: Any) -> Iterator[None]:
    """Leave out transformers' progress bars and warnings of each stage."""
    logging = transformers.utils.logging
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def folder_of(source: Source) -> Iterator[Path]:
    """Yield a folder of the source for transformers, which is removed at the end.

    Raises RequestError for a source without config.json, or for files that cannot be read.
    """
    if not (source.root / CONFIG).is_file():
        raise RequestError(
            f"Transformers needs the publisher's {CONFIG}.",
            where=str(source.place),
            found="none",
            remedy="Use the publisher's folder, or put its config.json beside the weights.",
        )
    with TemporaryDirectory(prefix="hqconv-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(json.dumps(_without_code(source.config)))
        try:
            for path in sorted(source.root.iterdir()):
                if _TOKENIZER_FILE.fullmatch(path.name) and not path.name.endswith(".index.json"):
                    (folder / path.name).write_bytes(read_regular(path, MAX_LIST_BYTES))
        except OSError as error:
            where, found = error.filename or source.root, error.strerror
            raise RequestError(
                "A tokenizer's file cannot be read.", where=str(where), found=found
            ) from error
        yield folder


def _without_code(value: Any) -> Any:
    """Return a config without the keys that name code."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without_code(item) for key, item in value.items() if not _CODE_KEYS.fullmatch(key)
    }


def config_of(transformers: Any, folder: Path) -> Any:
    """Return transformers' config of a folder of `folder_of`. Raises transformers' errors, and RequestError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if getattr(part, "_attn_implementation", None) not in _ATTENTION:  # the class's own
            part._attn_implementation = None
    return config


def model_class(transformers: Any, source: Source, config: Any) -> Any:
    """Return the model's class in transformers: that of the config's `architectures`, or a causal language model.

    Raises KeyError for a config without such a model, TypeError where `architectures` is no list of names.
    """
    for name in source.config.get("architectures") or []:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


def quantizer_of(source: Source, config: Any) -> Any:
    """Return transformers' decoder of a quantized source; None for a plain one. Raises RequestError if it has none."""
    if source.quantization is None:
        return None
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(dict(source.quantization), pre_quantized=True)
        _ = quantizer.quantization_config.dequantize  # those without it run quantized weights only
    except Exception as error:
        raise RequestError(
            "The transformers library cannot decode the weights of this quantized source.",
            where=f"{source.place}: quant_method {source.quantization.get('quant_method')}",
            expected="a source in 16 bits or float32, or one that transformers decodes (fp8, mxfp4)",
            found=error,
            remedy="Use the 16-bit model that the source was made from.",
        ) from error
    quantizer.quantization_config.dequantize = True
    config.quantization_config = quantizer.quantization_config
    return quantizer


class Text(NamedTuple):
    """Token ids of a text. start: what the tokenizer puts before every text, BOS or nothing. raw: the file's bytes."""

    ids: list[int]
    start: list[int]
    raw: bytes

    def sequences(self, context_length: int) -> list[list[int]]:
        """Cut the ids into sequences of `context_length` tokens, each with the start; the last may be shorter."""
        size = context_length - len(self.start)
        return [
            self.start + self.ids[begin : begin + size] for begin in range(0, len(self.ids), size)
        ]


def read_text(
    transformers: Any,
    folder: Path,
    path: Path,
    num_tokens: int,
    option: str = "--text",
    source: str = "SRC",
    begin_of: Callable[[int], int] | None = None,
) -> Text:
    """Return the first `num_tokens` tokens of a text file, without the tokenizer's special ones.

    folder: of `folder_of`. source: its name, for errors. begin_of: the number of tokens of the whole text → the number
    of those before a place; then the text is what follows the place, without lines that stand before it, and it may
    have no tokens.

    Raises RequestError, which names the `option`, for a file without text, or an unusable tokenizer.
    """
    raw, text = _read(path, option)
    tokenizer = _tokenizer_of(transformers, folder, source)
    if path == BUILTIN_TEXT and tokenizer.chat_template:
        text = _in_chat_template(text, tokenizer)
    with running(f"the tokenizer of {source}"):
        if begin_of is not None:
            text = _rest(tokenizer, text, begin_of)
            raw = text.encode()
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        start = _start(tokenizer, text) if ids else []
    if not ids and begin_of is None:
        raise RequestError(
            "The text has no tokens.",
            where=f"{option} {path}",
            expected="a text of the model's use",
        )
    return Text(ids[:num_tokens], start, raw)


def _rest(tokenizer: Any, text: str, begin_of: Callable[[int], int]) -> str:
    """Return what follows some tokens of a text, without lines that stand in them."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in found["offset_mapping"]]
    begin = begin_of(len(ends))
    cut = ends[begin - 1] if begin else 0
    read = {line.strip() for line in text[:cut].splitlines()} - {""}
    lines = text[cut:].splitlines(keepends=True)
    return "".join(line for line in lines if line.strip() not in read)


def _read(path: Path, option: str) -> tuple[bytes, str]:
    """Return a text file's bytes and text. Raises RequestError."""
    try:
        raw = read_regular(path, MAX_TEXT_BYTES)
        text = raw.decode()
        return raw, _text_of_lines(path, text) if path.suffix == ".jsonl" else text
    except OSError as error:
        raise RequestError(
            "The text cannot be read.",
            where=f"{option} {path}",
            expected=f"a file of at most {MAX_TEXT_BYTES >> 20} MiB",
            found=error.strerror or error,
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            "The text is not UTF-8.",
            where=f"{option} {path}",
            found=error,
            remedy="Convert the file to UTF-8, or leave it out.",
        ) from error


def _text_of_lines(path: Path, text: str) -> str:
    """Return the texts of JSON lines, each under the key `text` or of `messages`. Raises RequestError for others."""
    passages = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        try:
            document = json.loads(line)
            messages = document.get("messages")
            passage = document.get("text") or _BETWEEN.join(str(one["content"]) for one in messages)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                "A line of the text is no JSON object with `text` or `messages`.",
                where=f"{path}: line {number}",
                remedy="Give a file with one such object on each line, or plain text under another name.",
            ) from error
        passages.append(str(passage))
    return _BETWEEN.join(passages)


def _in_chat_template(text: str, tokenizer: Any) -> str:
    """Return the text of the package with its dialogues in the tokenizer's chat template.

    Templates run in the sandbox of transformers, in a process with limits. A dialogue stays as it is where the template
    refuses it; where it refuses all, or is cut off, a warning says so.
    """

    def rendered(passage: str) -> str | None:
        before, *turns = _TURN.split(passage)
        if before or not turns:
            return passage
        messages = [
            {"role": role.lower(), "content": content.strip()}
            for role, content in zip(turns[::2], turns[1::2], strict=True)
        ]
        try:
            dialogue: str = tokenizer.apply_chat_template(
                messages, chat_template=_DATE + tokenizer.get_chat_template(), tokenize=False
            )
        except Exception:  # noqa: BLE001 - roles that it does not know, memory beyond the limit
            return None
        return dialogue.removeprefix(bos)

    passages = text.split(_BETWEEN)
    with running("the chat template of the source"):
        import_module("jinja2")
        # The start stands before each sequence.
        bos = tokenizer.bos_token if _start(tokenizer, text) else ""
    dialogues = _limited(lambda: [rendered(passage) for passage in passages]) or []
    if sum(len(dialogue or "") for dialogue in dialogues) > MAX_TEXT_BYTES:
        dialogues = []
    text_in_template = _BETWEEN.join(
        dialogue or passage for passage, dialogue in zip_longest(passages, dialogues)
    )
    if text_in_template == text:
        _LOG.warning(
            "The chat template of the source failed or was cut off: the dialogues of the text stay plain."
        )
    return text_in_template


def _limited(function: Callable[[], list[str | None]]) -> list[str | None] | None:
    """Return the result of a function that runs foreign code, from a child with limits; None if it has none by then."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * resource.getpagesize() + _CHILD_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with suppress(Exception):
            sender.send(function())

    child = context.Process(target=run, daemon=True)
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_CHILD_SECONDS) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def _tokenizer_of(transformers: Any, folder: Path, source: str) -> Any:
    """Load the tokenizer of a folder of `folder_of`. Raises RequestError."""
    if not has_tokenizer([path.name for path in folder.iterdir()]):
        raise RequestError(
            "The source has no tokenizer, which cuts a text into tokens.",
            where=source,
            expected="tokenizer.json, tokenizer.model, vocab.json …",
            remedy="Copy the publisher's files into it.",
        )
    with running(f"the tokenizer of {source}"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _start(tokenizer: Any, text: str) -> list[int]:
    """Return what the tokenizer puts before a text: BOS or nothing."""
    whole: list[int] = tokenizer(text[:64])["input_ids"]
    plain: list[int] = tokenizer(text[:64], add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and whole[:2] == [bos, *plain[:1]] else []


def check_counts(counts: Mapping[str, Any]) -> None:
    """Raise RequestError for numbers of tokens, by option, below `LEAST_TOKENS`."""
    for option, value in counts.items():
        if type(value) is not int or value < LEAST_TOKENS:
            raise RequestError(
                "The option needs a larger number of tokens.",
                where=option,
                expected=f"a whole number from {LEAST_TOKENS} up",
                found=repr(value),
            )


def positions_warning(positions: Any, longest: int, option: str) -> list[str]:
    """Warn of sequences that are longer than a model's positions, a value of its config. option: of their length."""
    if type(positions) is not int or longest <= positions:
        return []
    return [
        f"sequences of {longest} tokens are longer than the model's {positions} positions "
        f"(max_position_embeddings): its predictions are worse there. Use a smaller {option}."
    ]
