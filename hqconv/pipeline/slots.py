"""The host memory that batches use one after the other: made when it is wanted, and never more than was planned."""

from __future__ import annotations

import threading

import torch

from hqconv.pipeline.devices import Slot, make_slot
from hqconv.pipeline.profile import Profile
from hqconv.pipeline.resources import Staging
from hqconv.pipeline.stages import Stages

STAGE = "slot"


class Slots:
    """All slots of a conversion. `take` is for the thread that owns the stages, `give` for any."""

    def __init__(self, staging: Staging, device: torch.device, stages: Stages, profile: Profile) -> None:
        self._staging, self._device, self._stages, self._profile = staging, device, stages, profile
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._num_slots = 0  # made or being made
        self._is_making = False

    def take(self) -> Slot:
        """A slot that nobody uses; waits for one, and has another one made where that is allowed.

        Pinning takes longer than a batch does: meanwhile another slot may come back.
        """
        with self._lock:
            must_make = not self._free and not self._is_making and self._num_slots < self._staging.num_slots
            self._num_slots += must_make
            self._is_making |= must_make
        if must_make:
            self._stages.start(STAGE, 0, self._make)
        if not self._free:
            with self._profile.waiting("a free slot"):
                self._stages.wait(lambda: bool(self._free))
        with self._lock:
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._free.append(slot)
        self._stages.tell()

    def _make(self) -> None:
        slot = make_slot(self._staging.slot_bytes, self._staging.out_bytes, self._device)
        self._is_making = False
        self.give(slot)
