"""What the Hub and its library say of a failure, as one of our errors.

What people can mend themselves (a name, a token, terms to accept) ends with 2 or 3; what may work later with 5.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hqconv.errors import HqconvError, InputError, NetworkError, OutputError, RequestError

_SIGN_IN = "`hf auth login` or set HF_TOKEN"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_Told = tuple[type[HqconvError], str, str]  # the error's class, what, and what to do


@contextmanager
def explained(repo_id: str, revision: str | None) -> Iterator[None]:
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


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error of the Hub library, or of ours made of one, came from; None without any."""
    response = _response(error)
    return None if response is None else int(response.status_code)


def _response(error: BaseException | None) -> Any:
    """The answer that an error came from: it may lie below one that says that the cache has no file either."""
    while error is not None:
        response = vars(error).get("response")
        if response is not None:
            return response
        error = error.__cause__
    return None


def _explain(error: Exception, repo_id: str, revision: str) -> HqconvError:
    kind, what, remedy = _of_repo(error, repo_id, revision) or _of_status(error) or _of_machine(error)
    lines = str(error).strip().splitlines() or [""]
    found, status = f"{type(error).__name__}: {lines[0]}", status_of(error)
    if status is not None and str(status) not in found:
        found += f" (HTTP {status})"
    return kind(what, where=f"{repo_id}, revision {revision}", found=found, remedy=remedy)


def _of_repo(error: Exception, repo_id: str, revision: str) -> _Told | None:
    """What is wrong with the repo that is asked for, where the Hub says so."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    # Subclasses first: gated is a kind of not found for the library.
    if isinstance(error, errors.GatedRepoError):
        return RequestError, "The Hub repo is gated.", f"Accept its terms at {page}, then {_SIGN_IN}."
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "There is no such folder here and no such repo on the Hub, or the repo is private."
        return RequestError, what, f"Check the spelling; for a private repo {_SIGN_IN}."
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = f"See the branches and tags at {page}/tree/main."
        return RequestError, "The Hub repo has no such revision.", remedy
    if isinstance(error, errors.HFValidationError):
        what = "This is neither a folder nor a valid Hub repo id."
        return RequestError, what, "Give a folder or org/name."
    if isinstance(error, errors.DisabledRepoError):
        return RequestError, "The Hub repo is disabled.", f"See what its owner says at {page}."
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return InputError, "The Hub repo lacks a file.", f"See its files at {page}/tree/{revision}."
    return None


def _of_status(error: Exception) -> _Told | None:
    """What the Hub answered, where it answered."""
    status = status_of(error)
    if status == 401:
        return RequestError, "The Hub does not accept the token, or wants one.", f"Sign in: {_SIGN_IN}."
    if status == 403:
        remedy = f"Give the token the right to read the repo, or take another: {_SIGN_IN}."
        return RequestError, "The Hub denies access to the repo.", remedy
    if status == 429:
        wait = _wait(_response(error))
        after = f"Wait {wait} and try again" if wait else "Wait a few minutes and try again"
        what = "The Hub was asked too often."
        return NetworkError, what, f"{after}; who is signed in ({_SIGN_IN}) may ask more often."
    if status is not None and status >= 500:
        what = "The Hub is out of order."
        return (
            NetworkError,
            what,
            "Try again later: what was fetched is kept. See https://status.huggingface.co.",
        )
    return None


def _wait(response: Any) -> str:
    """How long the Hub wants not to be asked, by Retry-After or its own header of limits; else empty."""
    from huggingface_hub import utils

    seconds = response.headers.get("Retry-After", "")
    if seconds and not seconds.isdigit():
        return f"until {seconds}"
    library: Any = utils
    limits = getattr(library, "parse_ratelimit_headers", None)
    if not seconds and limits is not None and (told := limits(response.headers)) is not None:
        seconds = str(told.reset_in_seconds)
    return f"{seconds} seconds" if seconds else ""


def _of_machine(error: Exception) -> _Told:
    """What lies on this side: offline mode, the network, the cache's disk."""
    from huggingface_hub import constants, errors

    number = getattr(error, "errno", None)
    if number in _NO_SPACE:
        what = "The disk of the Hub's cache is full."
        return (
            OutputError,
            what,
            "Free some space, or have HF_HOME name another place: finished files are kept.",
        )
    if number in _NO_ACCESS:
        return OutputError, "The Hub's cache cannot be written.", "Mend its permissions, or set HF_HOME."
    if constants.HF_HUB_OFFLINE:
        what = "There is no such folder here; HF_HUB_OFFLINE is set, but the cache lacks (part of) the repo."
        return RequestError, what, "Unset HF_HUB_OFFLINE, or fill the cache with `hf download` first."
    if isinstance(error, errors.LocalEntryNotFoundError) or "Connect" in type(error).__name__:
        what = f"The Hub ({constants.ENDPOINT}) cannot be reached, and the cache lacks (part of) the repo."
        return NetworkError, what, "Check the connection and HF_ENDPOINT, or give a local folder."
    what = "The download from the Hub failed."
    return NetworkError, what, "Check the connection and try again: finished files are kept."
