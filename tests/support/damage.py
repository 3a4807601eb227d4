"""Damage to messages, as a network or a hostile peer may do it."""

from __future__ import annotations

import random

_BYTES = b"\x00\x01\x08\x0a\x10\x18\x20\x2a\x7f\x80\x81\xff"  # the least and the greatest, and tags of messages


def damaged(message: bytes, rng: random.Random) -> bytes:
    """Return a message with some of its bytes changed, cut off, inserted, removed or repeated."""
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 4, 16))):
        at, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        kind = rng.randrange(8)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = rng.choice((rng.randbytes(rng.choice((1, 4, 10))), rng.choices(_BYTES, k=3)))
        elif kind == 3:
            data[at:at] = data[at:stop]
        elif kind == 4 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 5 and at < len(data):
            data[at] = rng.choice((rng.randrange(256), rng.choice(_BYTES)))
        elif kind == 6 and at < len(data):
            data[at] = data[at] + rng.choice((-1, 1)) & 0xFF
        elif at < len(data):  # a varint with one byte more, which changes its value or does not
            data[at : at + 1] = bytes([data[at] | 0x80, rng.choice((0, 0, 1, 0x80))])
    return bytes(data)
