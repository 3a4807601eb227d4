"""Arrays in memory that another process sees, too: made by one, mapped by the other, never copied.

    SharedArrays (their maker) -> place of an array, file descriptor of memory that is new -> MappedArrays

The memory has no name, so nothing is left behind if a process is killed; it goes when nobody has it mapped any more.
Linux only.
"""

from __future__ import annotations

import collections
import itertools
import math
import mmap
import os
import weakref
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["MappedArrays", "SharedArrays", "SharedPlace", "is_supported"]

Array = npt.NDArray[Any]

_SMALL_BYTES = 1 << 14  # what fits into a message: each memory takes a file descriptor of both processes


def is_supported() -> bool:
    """Return whether this system has such memory."""
    return hasattr(os, "memfd_create")


class SharedPlace(NamedTuple):
    """Where an array is.

    Attributes:
        memory: number of the memory; the array begins where it begins.
        shape: of the array.
        dtype: likewise.
    """

    memory: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class SharedArrays:
    """Makes arrays in shared memory, and tells the other process of them. Not thread-safe but for `empty`."""

    def __init__(self, connection: Connection) -> None:
        """Tell of them over a connection between processes of one machine."""
        self._connection = connection
        self._numbers = itertools.count()
        self._at: dict[int, int] = {}  # number of a memory, by its address
        self._files: dict[int, tuple[int, int]] = {}  # descriptor and size of those that were not told of
        self._gone: collections.deque[int] = collections.deque()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array, its contents arbitrary; one of objects, or a small one, is not shared."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or num_bytes < _SMALL_BYTES:
            return np.empty(shape, dtype)
        file = os.memfd_create("reverb-writer")
        os.ftruncate(file, num_bytes)
        memory = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
        number, address = next(self._numbers), _address(memory)
        self._files[number], self._at[address] = (file, num_bytes), number
        weakref.finalize(memory, self._forget, number, address)
        return memory.view(dtype).reshape(shape)

    def place(self, array: Array) -> SharedPlace | None:
        """Return where an array is that begins where one of these begins; None if there is none.

        What is new to the other process is sent first.
        """
        number = self._at.get(_address(array))
        if number is None or not array.flags.c_contiguous or not array.size:
            return None
        if number in self._files:
            file, num_bytes = self._files.pop(number)
            gone = [self._gone.popleft() for _ in range(len(self._gone))]  # another thread may append
            try:
                self._connection.send(("memory", number, num_bytes, gone))
                reduction.send_handle(self._connection, file, os.getpid())
            finally:
                os.close(file)
        return SharedPlace(number, array.shape, array.dtype)

    def _forget(self, number: int, address: int) -> None:
        if self._at.get(address) == number:
            del self._at[address]
        file, _ = self._files.pop(number, (None, 0))
        if file is not None:
            os.close(file)
        self._gone.append(number)


class MappedArrays:
    """The other process's arrays. Not thread-safe."""

    def __init__(self, connection: Connection) -> None:
        """Learn of them over a connection."""
        self._connection = connection
        self._memories: dict[int, Array] = {}

    def receive(self, number: int, num_bytes: int, gone: list[int]) -> None:
        """Map the memory that a `memory` message tells of."""
        file = reduction.recv_handle(self._connection)
        try:
            self._memories[number] = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
        finally:
            os.close(file)
        for other in gone:
            self._memories.pop(other, None)

    def clear(self) -> None:
        """Forget all memory; what arrays are of stays mapped as long as they are there."""
        self._memories.clear()

    def array(self, place: SharedPlace) -> Array:
        """Return the array at a place: the same memory."""
        num_bytes = math.prod(place.shape) * place.dtype.itemsize
        return self._memories[place.memory][:num_bytes].view(place.dtype).reshape(place.shape)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
