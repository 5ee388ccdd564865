"""Forward passes that stop at chosen modules, so that many passes go through a model one module at a time.

A pass runs in a thread of its own, and does not call the chosen modules: it hands each call to the thread that owns the
pass, and waits for the result. Only one thread computes at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hqconv.errors import RequestError

if TYPE_CHECKING:
    from hqconv.calibration.streamed_model import StreamedModel

_own = threading.local()  # `.forward_pass` of the thread of a pass


class _Stopped(BaseException):
    """Raised in the thread of a pass that nobody will continue."""


@dataclass(frozen=True)
class Call:
    """Call of a chosen module that a pass waits for: the module's name, its own `forward`, and the arguments."""

    name: str
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Compute the module's output in this thread."""
        with torch.inference_mode():
            return self.forward(*self.args, **self.kwargs)


class ForwardPass:
    """One run of a function in a thread that stops at each call of a chosen module.

    call: the call that the pass waits for, None at the end. output: the function's result, at the end.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        """Run the function up to its first call of a chosen module. Raises the function's errors."""
        self.call: Call | None = None
        self.output: Any = None
        self._error: Exception | None = None
        self._answer: Any = None
        self._is_stopped = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="hqconv-pass", daemon=True
        )
        self._thread.start()
        self._wait()

    def resume(self, answer: Any) -> None:
        """Continue with the output of the module that the pass waits for. Raises the function's errors."""
        self.call, self._answer = None, answer
        self._go.release()
        self._wait()

    def stop(self) -> None:
        """End a pass that waits; nothing happens if it has ended."""
        if self.call is not None:
            self._is_stopped, self.call = True, None
            self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._back.acquire()
        if self.call is None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, function: Callable[[], Any]) -> None:
        _own.forward_pass = self
        torch.set_num_threads(1)  # a pool of processors for each of many threads would be too many
        try:
            with torch.inference_mode():
                self.output = function()
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - raised again in the owner's thread
            self._error = error
        finally:
            self._back.release()

    def hand_over(self, call: Call) -> Any:
        """Return the output of a call, computed by the owner; in the thread of the pass."""
        self.call = call
        self._back.release()
        self._go.acquire()
        if self._is_stopped:
            raise _Stopped
        answer, self._answer = self._answer, None
        return answer


class Stream:
    """Forward passes of a streamed model over a text, which are at the same stage.

    batches: token ids [B, T] of each pass.
    """

    def __init__(self, model: StreamedModel, batches: Sequence[torch.Tensor]) -> None:
        """Run every pass to its first stage. Raises transformers' errors."""
        self.model, self.batches = model, batches
        self._passes: list[ForwardPass] = []
        try:
            for ids in batches:
                self._passes.append(ForwardPass(partial(_logits, model.model, ids)))
        except BaseException:
            self.stop()
            raise

    @property
    def stage(self) -> str:
        """The stage that all passes wait for. Raises RequestError where they wait for several, or have ended."""
        names = {one.call.name if one.call else "" for one in self._passes}
        if len(names) != 1 or "" in names:
            raise RequestError(
                "The transformers library runs this model in an order that hqconv does not know.",
                where=self.model.place,
                found=", ".join(sorted(names)),
                remedy="Convert without --calibrate; the artifact cannot be evaluated.",
            )
        return names.pop()

    def advance(self, look: Callable[[Any], Any] = lambda _: None) -> list[Any]:
        """Compute the stage for each pass, and run the pass to the next one.

        Returns what `look` returns for each output of the stage.
        """
        found = []
        for one in self._passes:
            assert one.call is not None
            answer = one.call.run()
            found.append(look(answer))
            one.resume(answer)
        return found

    def logits(self) -> Iterator[torch.Tensor]:
        """Run one pass after the other from the last stage to its end, and yield its logits [B, T, V]."""
        for one in self._passes:
            assert one.call is not None
            one.resume(one.call.run())
            logits, one.output = one.output, None
            yield logits

    def stop(self) -> None:
        """End all passes."""
        for one in self._passes:
            one.stop()


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def stop_at(name: str, module: nn.Module) -> None:
    """Let every pass stop at a module; calls outside of a pass are as before."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        forward_pass: ForwardPass | None = getattr(_own, "forward_pass", None)
        call = Call(name, original, args, kwargs)
        return call.run() if forward_pass is None else forward_pass.hand_over(call)

    module.forward = forward
