"""Decode the strings of a tensor: either lengths as varints of up to 32 bits, then all bytes; or one field each.

Source: TensorFlow 2.15 (`tensor_coding.cc`, EncodeStringList).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError

_MORE = 0x80  # marks a byte of a varint that is not its last


def decode(content: bytes, strings: Sequence[bytes], count: int) -> npt.NDArray[Any]:
    """Return `count` strings as an object array of `bytes`, [count].

    They are lengths and bytes in `content`; if it is empty, the fields `strings`.
    """
    found = _split(content, count) if content else list(strings)
    if len(found) != count:
        raise damaged(f"{len(found)} strings, expected {count} from their shape")
    array = np.empty(count, np.object_)
    array[:] = found
    return array


def damaged(what: str) -> FormatError:
    """Return an error that says that stored data is damaged; `what` names the data."""
    return FormatError(f"{what}. The data is damaged, or was not written by a Reverb client.")


def _split(content: bytes, count: int) -> list[bytes]:
    """Split bytes that hold the lengths of all strings, as varints of up to 32 bits, and then the strings."""
    lengths: list[int] = []
    position = 0
    while len(lengths) < count:
        length = 0
        for shift in range(0, 32, 7):
            if position == len(content):
                raise damaged(f"{count} strings in {len(content)} bytes, which cannot hold even the lengths")
            byte = content[position]
            position += 1
            length |= byte % _MORE << shift
            if byte < _MORE:
                break
        else:
            raise damaged("string with a length of more than 32 bits")
        lengths.append(length)
    ends = list(itertools.accumulate(lengths, initial=position))
    if ends[-1] != len(content):
        raise damaged(f"{count} strings that end at byte {ends[-1]}, expected {len(content)}")
    return [content[start:end] for start, end in itertools.pairwise(ends)]
