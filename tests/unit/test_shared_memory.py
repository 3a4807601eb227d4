"""Arrays in memory that another process sees, too; here both ends are in one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from reverb_writer.reading.shared_memory import MappedArrays, SharedArrays, SharedPlace, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="only Linux has memory without a name")

FRAMES = (10, 84, 84)  # 70,560 bytes


class Ends:
    """Both ends of a connection, and the arrays of each."""

    def __init__(self, maker: Connection, reader: Connection) -> None:
        self.maker, self.reader = maker, reader
        self.shared, self.mapped = SharedArrays(maker), MappedArrays(reader)

    def hear(self) -> None:
        """Receive all that the maker told of memory."""
        while self.reader.poll():
            kind, *told = self.reader.recv()
            assert kind == "memory"
            self.mapped.receive(*told)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        maker, reader = multiprocessing.Pipe()
        yield Ends(stack.enter_context(maker), stack.enter_context(reader))


def placed(ends: Ends, array: npt.NDArray[Any]) -> SharedPlace:
    place = ends.shared.place(array)
    assert place is not None
    ends.hear()
    return place


def mapped_files() -> int:
    return sum("reverb-writer" in mapping.path for mapping in psutil.Process().memory_maps(grouped=False))


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.bool_, "datetime64[ns]", "<i2,<f4", ">f4"])
def test_both_ends_see_the_same_memory(ends: Ends, dtype: str) -> None:
    ours = ends.shared.empty((3000, 7), np.dtype(dtype))
    ours.view(np.uint8)[...] = 1
    theirs = ends.mapped.array(placed(ends, ours))
    assert (theirs.dtype, theirs.shape) == (np.dtype(dtype), (3000, 7))
    assert theirs.tobytes() == b"\1" * 21_000 * np.dtype(dtype).itemsize
    theirs.view(np.uint8)[1000] = 5
    assert (ours.view(np.uint8)[1000] == 5).all()


def test_first_rows_and_other_shapes_are_found_where_they_begin(ends: Ends) -> None:
    ours = ends.shared.empty(FRAMES, np.dtype(np.uint8))
    ours[...] = np.arange(10)[:, None, None]
    for part in (ours[:4], ours.reshape(5, 2, 84, 84), ours[:1], ours.view(np.uint32)):
        theirs = ends.mapped.array(placed(ends, part))
        assert theirs.dtype == part.dtype
        np.testing.assert_array_equal(theirs, part)


def test_what_is_not_shared_has_no_place(ends: Ends) -> None:
    ours = ends.shared.empty(FRAMES, np.dtype(np.uint8))
    for array in (np.zeros(FRAMES, np.uint8), ours[1:], ours[:, ::2], ours[:0]):
        assert ends.shared.place(array) is None
    assert not ends.reader.poll()


def test_objects_and_small_arrays_are_ordinary(ends: Ends) -> None:
    for shape, dtype in (((100_000,), object), ((0, 84), np.uint8), ((256,), np.float32)):
        array = ends.shared.empty(shape, np.dtype(dtype))
        assert (array.shape, array.dtype, array.flags.owndata) == (shape, np.dtype(dtype), True)
        assert ends.shared.place(array) is None


def test_memory_is_told_of_once(ends: Ends) -> None:
    ours = ends.shared.empty(FRAMES, np.dtype(np.uint8))
    first = placed(ends, ours)
    assert ends.shared.place(ours) == first
    assert not ends.reader.poll()


def test_memory_goes_when_both_ends_have_let_it_go(ends: Ends) -> None:
    before = mapped_files()
    for number in range(20):
        ours = ends.shared.empty(FRAMES, np.dtype(np.uint8))
        ours[...] = number
        theirs = ends.mapped.array(placed(ends, ours))
        assert (theirs == number).all()
        # This one and, at the reader, the one before, of which the end is told together with the next.
        assert mapped_files() - before <= 4
    del ours
    ends.mapped.clear()
    assert (theirs == 19).all()
    del theirs
    assert mapped_files() == before


def test_descriptors_are_no_more_than_memories(ends: Ends) -> None:
    process = psutil.Process()
    before = process.num_fds()
    for _ in range(50):
        ends.shared.empty(FRAMES, np.dtype(np.uint8))  # never told of
    assert process.num_fds() == before
    ours = ends.shared.empty(FRAMES, np.dtype(np.uint8))
    placed(ends, ours)
    del ours
    ends.mapped.clear()
    assert process.num_fds() == before


def test_array_outlives_the_maker() -> None:
    reader, maker = multiprocessing.Pipe()
    program = (
        "import sys, numpy as np\n"
        "from multiprocessing.connection import Connection\n"
        "from reverb_writer.reading.shared_memory import SharedArrays\n"
        "connection = Connection(int(sys.argv[1]))\n"
        "shared = SharedArrays(connection)\n"
        "array = shared.empty((1000, 100), np.dtype(np.int64))\n"
        "array[...] = np.arange(1000)[:, None]\n"
        "connection.send(tuple(shared.place(array)))\n"
    )
    with reader:
        with maker:
            descriptor = maker.fileno()
            command = [sys.executable, "-c", program, str(descriptor)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
            subprocess.run(command, pass_fds=[descriptor], env=environment, check=True, timeout=60)
        mapped = MappedArrays(reader)
        assert reader.recv() == ("memory", 0, 800_000, [])
        mapped.receive(0, 800_000, [])
        theirs = mapped.array(SharedPlace(*reader.recv()))
    np.testing.assert_array_equal(theirs, np.repeat(np.arange(1000)[:, None], 100, axis=1))
