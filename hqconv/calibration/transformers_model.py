"""A source's config, model class and tokenizer in transformers, without any code that the source holds or names.

transformers sees a folder of the process: config.json without the keys that name code, the tokenizer's files, and the
safetensors files that hqconv reads. So it finds no Python module, pickle or adapter of the source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hqconv.errors import HqconvError, InputError, RequestError, first_few
from hqconv.io.checkpoint_files import has_tokenizer
from hqconv.models.source_protocol import Source
from hqconv.schemas.artifact_names import CONFIG
from hqconv.schemas.untrusted_files import MAX_LIST_BYTES, read_regular

MAX_TEXT_BYTES = 16 << 20  # of a text: all of it is cut into tokens
_CODE_KEYS = ("auto_map", "custom_pipelines")  # Python modules of the folder
# Implementations that transformers would fetch and load, where the value names a repo of the Hub.
_IMPLEMENTATION = re.compile(
    r"_?(?:attn|attention|experts)_implementation(?:_internal)?|use_kernels?|kernel_config"
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

    Raises RequestError for a config that names an implementation on the Hub, or files that cannot be read.
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
        (folder / CONFIG).write_text(json.dumps(_without_code(source.config, CONFIG)))
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


def _without_code(value: Any, where: str) -> Any:
    """Return a config without the keys that name code. Raises RequestError where one names a repo of the Hub."""
    if isinstance(value, list):
        return [_without_code(one, where) for one in value]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, one in value.items():
        if _IMPLEMENTATION.fullmatch(key):
            if "/" in json.dumps(one) or (one and "kernel" in key):
                raise RequestError(
                    "The config asks for code from the Hub, which hqconv does not load.",
                    where=f"{where}: {key}",
                    expected="an implementation of transformers itself",
                    found=json.dumps(one),
                    remedy="Remove the key from config.json: hqconv chooses the implementation itself.",
                )
        elif key not in _CODE_KEYS:
            found[key] = _without_code(one, f"{where}: {key}")
    return found


def config_of(transformers: Any, folder: Path) -> Any:
    """Return transformers' config of a folder of `folder_of`. Raises transformers' errors, and RequestError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for one in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        asked = getattr(one, "_attn_implementation", None)
        if asked not in _ATTENTION:  # the class's own: the keys of the file are gone
            one._attn_implementation = None
    return config


def model_class(transformers: Any, source: Source, config: Any) -> Any:
    """Return the model's class in transformers: that of the config's `architectures`, or a causal language model.

    Raises RequestError where `architectures` is no list of names, or KeyError for a config without such a model.
    """
    names = source.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(
            "The model's architectures are no list of names.",
            where=f"{CONFIG}: architectures",
            expected='such as ["Qwen3MoeForCausalLM"]',
            found=json.dumps(names),
            remedy="Restore the publisher's config.json.",
        )
    for name in names:
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
    except Exception as error:
        raise _cannot_decode(source, error) from error
    if not hasattr(quantizer.quantization_config, "dequantize"):
        raise _cannot_decode(source, "it runs them quantized only")
    quantizer.quantization_config.dequantize = True
    config.quantization_config = quantizer.quantization_config
    return quantizer


def _cannot_decode(source: Source, found: object) -> RequestError:
    assert source.quantization is not None
    return RequestError(
        "The transformers library cannot decode the weights of this quantized source.",
        where=f"{source.place}: quant_method {source.quantization.get('quant_method')}",
        expected="a source in 16 bits or float32, or one that transformers decodes (fp8, mxfp4)",
        found=found,
        remedy="Use the 16-bit model that the source was made from.",
    )


def cannot_fill(source: Source, missing: list[str], found: object = "none") -> InputError:
    """Return the error for a model of transformers that the source's weights do not fill."""
    return InputError(
        "The model of transformers cannot be filled from the source.",
        where=str(source.root),
        expected=f"weights for {first_few(missing)}"
        if missing
        else "weights of the model's shapes",
        found=found,
        remedy="Load the model with transformers alone, to see if it can be run at all.",
    )


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
    files: Sequence[Path],
    num_tokens: int,
    option: str = "--text",
    source: str = "SRC",
) -> Text:
    """Return the first `num_tokens` tokens of text files, one after the other, without the tokenizer's special ones.

    folder: of `folder_of`. source: its name, for errors.

    Raises RequestError, which names the `option`, for a file without text, or an unusable tokenizer.
    """
    where, raw = f"{option} {files[0]}", _joined(files, option)
    tokenizer = _tokenizer_of(transformers, folder, source)
    text = _in_chat_template(files, raw.decode(), tokenizer)
    with running(f"the tokenizer of {source}"):
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RequestError(
            "The text has no tokens.", where=where, expected="a text of the model's use"
        )
    return Text(ids[:num_tokens], _start(tokenizer, text, source), raw)


def read_rest(
    transformers: Any,
    folder: Path,
    files: Sequence[Path],
    begin_of: Callable[[int], int],
    num_tokens: int,
    option: str = "--text",
    source: str = "SRC",
) -> Text:
    """Return the first `num_tokens` tokens after a place in text files, without lines that stand before it.

    begin_of: the number of tokens of the whole text → the number of those before the place. The other parameters, and
    what is raised, are those of `read_text`; RequestError also for a tokenizer that does not tell its tokens' places.
    """
    tokenizer = _tokenizer_of(transformers, folder, source)
    text = _in_chat_template(files, _joined(files, option).decode(), tokenizer)
    if not tokenizer.is_fast:
        raise RequestError(
            "The tokenizer does not tell where its tokens are in a text.", where=source
        )
    with running(f"the tokenizer of {source}"):
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        begin = begin_of(len(places))
        cut = places[begin - 1][1] if begin else 0
        seen = {line.strip() for line in text[:cut].splitlines()} - {""}
        rest = "".join(
            line for line in text[cut:].splitlines(keepends=True) if line.strip() not in seen
        )
        ids: list[int] = tokenizer(rest, add_special_tokens=False)["input_ids"] if rest else []
    return Text(ids[:num_tokens], _start(tokenizer, rest, source) if ids else [], rest.encode())


def _joined(files: Sequence[Path], option: str) -> bytes:
    """Return the bytes of text files, one after the other. Raises RequestError."""
    contents = []
    for path in files:
        where = f"{option} {path}"
        try:
            contents.append(read_regular(path, MAX_TEXT_BYTES))
            contents[-1].decode()
        except OSError as error:
            expected = f"a file of at most {MAX_TEXT_BYTES >> 20} MiB"
            raise RequestError(
                "The text cannot be read.",
                where=where,
                expected=expected,
                found=error.strerror or error,
            ) from error
        except UnicodeDecodeError as error:
            raise RequestError(
                "The text is not UTF-8.",
                where=where,
                found=f"byte {contents[-1][error.start]:#04x} at {error.start}",
                remedy="Convert the file to UTF-8, or leave it out.",
            ) from error
    return b"\n\n".join(contents)


def _in_chat_template(files: Sequence[Path], text: str, tokenizer: Any) -> str:
    """Return the text of the package with its dialogues in the tokenizer's chat template; others as they are.

    Templates run in the sandbox of transformers. A dialogue that the template refuses stays as it is.
    """
    if [*files] != [BUILTIN_TEXT] or not tokenizer.chat_template:
        return text
    bos = (
        tokenizer.bos_token if _start(tokenizer, text, "") else ""
    )  # it stands before each sequence

    def rendered(passage: str) -> str:
        before, *turns = _TURN.split(passage)
        if before or not turns:
            return passage
        pairs = zip(turns[::2], turns[1::2], strict=True)
        messages = [{"role": role.lower(), "content": content.strip()} for role, content in pairs]
        try:
            template = _DATE + tokenizer.get_chat_template()
            words: str = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False
            )
        except ImportError:  # of Jinja
            raise
        except Exception:  # noqa: BLE001 - a template refuses roles that it does not know
            return passage
        return words.removeprefix(bos)

    with running("the chat template of the source"):
        return _BETWEEN.join(map(rendered, text.split(_BETWEEN)))


def _tokenizer_of(transformers: Any, folder: Path, source: str) -> Any:
    """Load the tokenizer of a folder of `folder_of`. Raises RequestError."""
    if not has_tokenizer([one.name for one in folder.iterdir()]):
        raise RequestError(
            "The source has no tokenizer, which cuts a text into tokens.",
            where=source,
            expected="tokenizer.json, tokenizer.model, vocab.json …",
            remedy="Copy the publisher's files into it.",
        )
    with running(f"the tokenizer of {source}"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _start(tokenizer: Any, text: str, source: str) -> list[int]:
    """Return what the tokenizer puts before a text: BOS or nothing."""
    with running(f"the tokenizer of {source}"):
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
