"""Python processes for tests, forked from a server that has imported hqconv, torch, numba and Typer.

`run` and `Process` take the arguments of `subprocess.run` and `subprocess.Popen`, and the commands `[sys.executable,
"-m", …]`, `[sys.executable, "-c", …]` and `[sys.executable, SCRIPT, …]`. A fork costs hundredths of a second, and
a new Python with torch more than one. A test of start-up itself (what is loaded, in what order) uses `subprocess`, and
so does one that sets variables which Python, numba or CUDA read at their start.

The worker's server starts with its first use and ends with the worker. The server forks twice: the process becomes a
child of the worker, as `PR_SET_CHILD_SUBREAPER` is set meanwhile, so that the worker waits for it as for any other.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.make.places import REPO

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 1 << 17
# Not imported by the server: transformers and vLLM import huggingface_hub, which reads its variables at its import.
_NOT_IMPORTED = ("__main__", "evaluation", "serving.vllm", "triton")
_SERVER = "from tests.make import processes; processes.serve({})"
_lock = threading.Lock()


class Process(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` whose process is a fork of the server."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        _, _, cwd, env, _, _, shell, *streams = more[:13]
        assert not shell
        assert preexec_fn is None, "signals have their default handlers in a fork"
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable, words
        stdin, stdout, stderr = streams[0], streams[3], streams[5]
        job = {
            "arguments": words[1:],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        given = [
            theirs if theirs != -1 else own for own, theirs in enumerate((stdin, stdout, stderr))
        ]
        self.pid = _fork(job, given)
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def run(
    command: list[Any], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` in a fork of the server."""
    feed, timeout = options.pop("input", None), options.pop("timeout", None)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if feed is not None:
        options["stdin"] = subprocess.PIPE
    with Process(command, **options) as process:
        try:
            out, err = process.communicate(feed, timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _fork(job: dict[str, Any], streams: list[int]) -> int:
    """The pid of a fork with these streams; it is a child of this process."""
    with _lock:
        connection = _server()
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(connection, [json.dumps(job).encode()], streams)
            return int(connection.recv(64))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    code = _SERVER.format(theirs.fileno())
    subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=REPO, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    return ours


# --- the server -------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> NoReturn:
    """Fork for each request until the worker ends."""
    connection = socket.socket(fileno=descriptor)
    _import_all()
    gc.collect()
    gc.freeze()  # the forks' collections leave the pages of these objects shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        text, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
        if not text:
            os._exit(0)  # without a word of the libraries that leak at Python's end
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for other in (connection.detach(), reader, writer):
                    os.close(other)
                _become(json.loads(text), streams)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reader, 64))
        for used in (reader, writer, *streams):
            os.close(used)


def _import_all() -> None:
    import hqconv

    for module in pkgutil.walk_packages(hqconv.__path__, "hqconv."):
        if not any(word in module.name for word in _NOT_IMPORTED):
            with suppress(ImportError):
                importlib.import_module(module.name)
    from hqconv.humming_ops.runtime import humming

    humming()
    assert "huggingface_hub" not in sys.modules, (
        "its variables would be this server's, not those of a test"
    )


def _become(job: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the command in this process as `python ARGUMENTS` would, and end as it would, but without teardown."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for own, given in enumerate(streams):
        os.dup2(given, own)
    for given in streams:
        if given > 2:
            os.close(given)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    code = 0
    try:
        _execute(job["arguments"])
    except BaseException as error:  # noqa: BLE001 - it is told and becomes an exit code, as in Python itself
        code = _exit_code(error)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _execute(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(
            compile(rest[0], "<string>", "exec"),
            {"__name__": "__main__", "__builtins__": __builtins__},
        )
    elif first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
