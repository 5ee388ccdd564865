"""What a Hugging Face Hub repo holds: whole files into the Hub cache, or the headers of its shards alone.

The Hub library's exceptions are turned into ours. It takes half a second to import, so that functions do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqconv.checkpoint.safetensors import LENGTH_BYTES, header_length
from hqconv.errors import HqconvError, InputError, NetworkError, RequestError

_SIGN_IN = "`hf auth login` or set HF_TOKEN"
_FIRST_BYTES = 1 << 15  # of a shard: most headers fit, so that one request is enough


def fetch(
    repo_id: str,
    revision: str | None,
    *,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    cache_dir: str | None = None,
) -> Path:
    """Brings the matching files of a model repo into the Hub cache (or `cache_dir`) and returns the snapshot's folder.

    The folder's name is the commit hash. Offline, or where the Hub does not answer, it may lack files.
    Raises RequestError where repo or revision do not exist or access is denied, NetworkError where the download fails.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo_id, revision):
        folder: Any = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(allow_patterns) if allow_patterns is not None else None,
            ignore_patterns=list(ignore_patterns) if ignore_patterns is not None else None,
            cache_dir=cache_dir,
        )
    return Path(folder)


@dataclass(frozen=True)
class Listing:
    """The files of one commit of a repo: path → bytes, as the Hub says. `read_head` reads a shard's header alone."""

    repo_id: str
    commit: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, repo_id: str, commit: str) -> Listing:
        """Ask the Hub for the files of a commit. Raises as `fetch`."""
        from huggingface_hub import HfApi

        with _explained(repo_id, commit):
            siblings: Any = HfApi().model_info(repo_id, revision=commit, files_metadata=True).siblings
        return cls(repo_id, commit, {file.rfilename: int(file.size or 0) for file in siblings or ()})

    def read_head(self, name: str) -> bytes:
        """The bytes before the tensors of a safetensors file, by range requests.

        Raises InputError for a header that is not plausible, else as `fetch`.
        """
        where, size = f"{self.repo_id}/{name}", self.sizes[name]
        head = self._read(name, 0, min(_FIRST_BYTES, size))
        num_bytes = header_length(where, head, size)
        if num_bytes > len(head):
            head += self._read(name, len(head), num_bytes)
        return head[:num_bytes]

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes begin … end - 1 of a file; a server that ignores the range is not listened to any longer."""
        from huggingface_hub import get_session, hf_hub_url, utils

        url = hf_hub_url(self.repo_id, name, revision=self.commit)
        library: Any = utils  # which says nothing of its types
        headers = {
            **library.build_hf_headers(),
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        found = bytearray()
        with (
            _explained(self.repo_id, self.commit),
            get_session().stream("GET", url, headers=headers) as response,
        ):
            library.hf_raise_for_status(response)
            skip = begin if response.status_code == 200 else 0
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= skip + end - begin:
                    break
        found = found[skip : skip + end - begin]
        if len(found) < max(end - begin, LENGTH_BYTES):
            what, remedy = "The Hub sent fewer bytes of a file than it has.", "Try again."
            raise NetworkError(
                what, where=f"{self.repo_id}/{name}", expected=end - begin, found=len(found), remedy=remedy
            )
        return bytes(found)


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns what the Hub library raises into one of our errors."""
    from huggingface_hub import errors

    # The base of its HTTP exceptions: of requests, httpx or httpx2, by the library's version.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    # RuntimeError is what the Xet extension raises.
    failures = (OSError, ValueError, RuntimeError, http_error, errors.EntryNotFoundError)
    try:
        yield
    except HqconvError:
        raise
    except failures as error:
        raise _explain(error, repo_id, revision or "main") from error


def _explain(error: Exception, repo_id: str, revision: str) -> HqconvError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    kind: type[HqconvError] = RequestError
    # Subclasses first: gated is a kind of not found for the library.
    if isinstance(error, errors.GatedRepoError):
        what, remedy = "The Hub repo is gated.", f"Accept its terms at {page}, then {_SIGN_IN}."
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = "There is no such folder here and no such repo on the Hub, or the repo is private."
        remedy = f"Check the spelling; for a private repo {_SIGN_IN}."
    elif isinstance(error, errors.RevisionNotFoundError):
        what, remedy = (
            "The Hub repo has no such revision.",
            f"See the branches and tags at {page}/tree/main.",
        )
    elif isinstance(error, errors.HFValidationError):
        what, remedy = "This is neither a folder nor a valid Hub repo id.", "Give a folder or org/name."
    elif isinstance(error, errors.EntryNotFoundError) and not isinstance(
        error, errors.LocalEntryNotFoundError
    ):
        kind, what = InputError, "The Hub repo lacks a file."
        remedy = f"See its files at {page}/tree/{revision}."
    elif constants.HF_HUB_OFFLINE:
        what = "There is no such folder here; HF_HUB_OFFLINE is set, but the cache lacks (part of) the repo."
        remedy = "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first."
    elif isinstance(error, errors.LocalEntryNotFoundError):
        kind = NetworkError
        what = f"The Hub ({constants.ENDPOINT}) cannot be reached, and the cache lacks (part of) the repo."
        remedy = "Check the connection and HF_ENDPOINT, or give a local folder."
    else:
        kind, what = NetworkError, "The download from the Hub failed."
        remedy = "Check the connection, the token and the disk, and try again: finished files are kept."
    lines = str(error).strip().splitlines() or [""]
    where = f"{repo_id}, revision {revision}"
    return kind(what, where=where, found=f"{type(error).__name__}: {lines[0]}", remedy=remedy)
