"""Downloads from the Hugging Face Hub, with the Hub library's exceptions turned into ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hqconv.errors import RequestError

_SIGN_IN = "`hf auth login` or set HF_TOKEN"


def fetch(
    repo_id: str,
    revision: str | None,
    *,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
) -> Path:
    """Brings the matching files of a model repo into the Hub cache and returns the snapshot's folder.

    The folder's name is the commit hash. Offline, or where the Hub does not answer, it may lack files.
    Raises RequestError where repo or revision do not exist, access is denied, or the download fails.
    """
    # Imported here: the library takes half a second, and a local folder does not need it.
    from huggingface_hub import errors, snapshot_download

    # The base of its HTTP exceptions: of requests, httpx or httpx2, by the library's version.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    # RuntimeError is what the Xet extension raises.
    failures = (OSError, ValueError, RuntimeError, http_error, errors.EntryNotFoundError)
    try:
        folder: Any = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(allow_patterns) if allow_patterns is not None else None,
            ignore_patterns=list(ignore_patterns) if ignore_patterns is not None else None,
        )
    except failures as error:
        raise _explain(error, repo_id, revision or "main") from error
    return Path(folder)


def _explain(error: Exception, repo_id: str, revision: str) -> RequestError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    where = f"{repo_id}, revision {revision}"
    # Subclasses first: gated is a kind of not found for the library.
    if isinstance(error, errors.GatedRepoError):
        what, remedy = "the Hub repo is gated", f"accept its terms at {page}, then {_SIGN_IN}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = "there is no such folder here and no such repo on the Hub, or it is private"
        remedy = f"check the spelling; for a private repo {_SIGN_IN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        what, remedy = "the Hub repo has no such revision", f"see the branches and tags at {page}/tree/main"
    elif isinstance(error, errors.HFValidationError):
        what, remedy = "this is neither a folder nor a valid Hub repo id", "give a folder or org/name"
    elif isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        what = "no such folder here, and HF_HUB_OFFLINE is set but the cache lacks (part of) the repo"
        remedy = "unset HF_HUB_OFFLINE, or fill the cache with `hf download` first"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        what = f"the Hub ({constants.ENDPOINT}) cannot be reached, and the cache lacks (part of) the repo"
        remedy = "check the connection and HF_ENDPOINT, or give a local folder"
    else:
        what = "the download from the Hub failed"
        remedy = "check the connection, the token and the disk, and try again: finished files are kept"
    lines = str(error).strip().splitlines() or [""]
    return RequestError(what, where=where, found=f"{type(error).__name__}: {lines[0]}", remedy=remedy)
