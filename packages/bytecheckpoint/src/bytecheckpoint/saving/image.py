"""A rank's data file in memory: the copy of the values that training may then change.

The image has the layout of the file, so that it can be written as it is. It is kept between saves,
because a copy into unmapped memory is several times slower; for the same reason a thread makes it
ahead of the first save where the state is seen before. Writing begins after the copy: writing
at the same time slows the copy down and does not shorten the save.

On a GPU the copies are queued on separate streams. For parameters and optimizer state only the
optimizer's next step waits, on the device (the lazy copy of DataStates-LLM, arXiv 2406.10707),
because only that step changes them. Other values, such as statistics that a forward pass updates,
are copied first, and the caller's stream waits for them. With `stage="fork"` nothing is copied: a
child process writes the memory as it was at the fork.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from bytecheckpoint.planner.planner import RankPart
from bytecheckpoint.saving.streaming_copy import is_streamable, prepare, stream
from bytecheckpoint.state.local_tensors import LocalTensor
from bytecheckpoint.storage.files.dtypes import parse_dtype
from shared.topology.boxes import intersect

__all__ = ["Image", "find_sources", "give_way", "make_ahead"]

# Number of bytes from which streaming copies save more time than compiling them takes.
_WORTH_BYTES = 64 * 1024 * 1024
# Bytes between two touches: no page is smaller.
_PAGE_BYTES = 4096
_NICE = 10


class Image:
    """Memory for one data file, with a view of each chunk's place in it.

    Attributes:
        part: plan of the file's content.
        memory: uint8 [bytes of the file].
        num_bytes: number of bytes of the whole file, the table of checksums included.
    """

    def __init__(self, part: RankPart, *, is_pinned: bool = False) -> None:
        """Allocates the memory and writes the header.

        Args:
            part: plan of the file's content.
            is_pinned: allocate pinned memory, for copies from a GPU.
        """
        assert part.file is not None, "a rank that writes nothing needs no image"
        self.part = part
        self.num_bytes = part.file.num_bytes
        self.hashed_bytes = part.file.hashed_bytes or 0
        if is_pinned:
            self.memory = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapped = mmap.mmap(-1, self.num_bytes, flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapped.madvise(mmap.MADV_HUGEPAGE)
            self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.view = self.memory.numpy().data
        self.view[: len(part.header)] = part.header
        dtypes = {name: parse_dtype(d) for name, d in zip(part.names, part.dtypes, strict=True)}
        self._slots = [
            self.memory[start : start + box.numel * dtypes[name].itemsize]
            .view(dtypes[name])
            .view(box.sizes)
            for name, box, start in part.rows
        ]
        large = [] if is_pinned else [slot for slot in self._slots if is_streamable(slot, slot)]
        self._has_large = sum(slot.numel() * slot.itemsize for slot in large) >= _WORTH_BYTES
        if self._has_large:
            prepare()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def touch(self) -> None:
        """Maps every page, and changes no byte; not while the image is filled."""
        pages = self.memory.numpy()[::_PAGE_BYTES]
        pages |= 0  # numpy lets other threads run meanwhile

    @torch.no_grad()
    def fill(self, values: Sequence[Tensor]) -> None:
        """Copies the chunks' values in, on the CPU."""
        pairs = list(zip(self._slots, values, strict=True))
        if self._has_large:
            stream([pair for pair in pairs if is_streamable(*pair)])
            pairs = [pair for pair in pairs if not is_streamable(*pair)]
        if pairs:
            torch._foreach_copy_([slot for slot, _ in pairs], [value for _, value in pairs])

    @torch.no_grad()
    def fill_on_streams(
        self, values: Sequence[Tensor], is_lazy: Sequence[bool]
    ) -> list[torch.cuda.Event]:
        """Queues the copies from GPUs behind the work of the caller's streams.

        Args:
            values: in the image's order; those on the CPU are copied at once.
            is_lazy: for each value, whether only an optimizer's step changes it.

        Returns:
            One event per device, after its copies. The caller's streams wait for values not lazy.
        """
        places: dict[torch.device, list[int]] = {}
        for at, value in enumerate(values):
            if value.is_cuda:
                places.setdefault(value.device, []).append(at)
            else:
                self._slots[at].copy_(value)
        events = []
        for device, of_device in places.items():
            with torch.cuda.device(device):
                current = torch.cuda.current_stream()
                stream = self._streams.setdefault(device, torch.cuda.Stream())
                stream.wait_stream(current)
                for lazy in (False, True):
                    with torch.cuda.stream(stream):
                        for at in of_device:
                            if is_lazy[at] == lazy:
                                self._slots[at].copy_(values[at], non_blocking=True)
                                # Its memory must not be reused before the copy.
                                values[at].record_stream(stream)
                        event = torch.cuda.Event()
                        event.record(stream)
                    if not lazy:
                        current.wait_event(event)
                events.append(event)
        return events

    @property
    def arrays(self) -> list[np.ndarray]:
        """The chunks' places as arrays of plain integers."""
        return [view_as_array(slot) for slot in self._slots]


def make_ahead(part: RankPart, *, is_pinned: bool = False) -> Future[Image]:
    """Makes an image and maps its pages on a thread of low priority.

    Args:
        part, is_pinned: see `Image`.

    Returns:
        Future of the image, or of the error that there was.
    """
    made: Future[Image] = Future()

    def make() -> None:
        try:
            give_way()
            image = Image(part, is_pinned=is_pinned)
            if not is_pinned:
                image.touch()
        except BaseException as error:  # noqa: BLE001 - raised where the image is asked for
            made.set_exception(error)
        else:
            made.set_result(image)

    threading.Thread(target=make, name="bytecheckpoint-image").start()
    return made


def give_way() -> None:
    """Lowers this thread's priority below training's; for threads that end with their work."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def view_as_array(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's elements as integers of their size; of any type and strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).numpy()
    return tensor.view(integers[tensor.itemsize]).numpy()


def find_sources(part: RankPart, tensors: dict[str, LocalTensor]) -> Iterable[Tensor]:
    """The user's memory of each chunk that a rank writes, in file order.

    A chunk is a piece as the rank listed it, or a part of one where the plan split it.
    """
    for name, box, _ in part.rows:
        for piece in tensors[name].pieces:
            if piece.box == box:
                yield piece.tensor
                break
            if intersect(piece.box, box) == box:
                yield piece.tensor[box.within(piece.box)]
                break
        else:
            raise AssertionError(f"the plan has this rank write {box} of {name}, which it lacks")
