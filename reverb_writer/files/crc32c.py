"""CRC-32C, which TFRecord files have beside each record, without a package of its own.

Snappy's frames have the checksum of each block of up to 64 KiB, masked as TFRecord masks it. `cramjam`, which decodes
chunks anyway, writes such frames at the speed of compiled code. Checksums of the blocks of longer data are combined:

    crc(a + b) = shift(crc(a)) ^ crc(b),    where `shift` is what as many zero bits as b has make of a remainder

Source: Snappy's framing_format.txt; TensorFlow 2.15 (`crc32c.h`); zlib (`crc32_combine`).
"""

from __future__ import annotations

import functools

from cramjam import snappy

_BLOCK_BYTES = 1 << 16
_BITS = 32
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first
_MASK_DELTA = 0xA282EAD8
_AT = slice(14, 18)  # in a frame: ten bytes name the format, four are the kind and size of the block


def masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C of some bytes.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    if len(data) <= _BLOCK_BYTES:
        return _masked_of_block(data)
    view = memoryview(data)
    first = len(data) % _BLOCK_BYTES  # the short block comes first, so that each shift is by a whole one
    crc = _unmasked(_masked_of_block(view[:first]))
    for start in range(first, len(data), _BLOCK_BYTES):
        block = _unmasked(_masked_of_block(view[start : start + _BLOCK_BYTES]))
        crc = _times(_block_shift(), crc) ^ block
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _masked_of_block(data: bytes | memoryview) -> int:
    if not data:
        return _MASK_DELTA  # there is no frame without data
    return int.from_bytes(memoryview(snappy.compress(data))[_AT], "little")


def _unmasked(masked: int) -> int:
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


@functools.cache
def _block_shift() -> list[int]:
    """Return what the zero bits of a whole block make of each bit of a remainder."""
    shift = [_POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1))]  # by one bit
    for _ in range((8 * _BLOCK_BYTES).bit_length() - 1):
        shift = [_times(shift, column) for column in shift]  # by twice as many
    return shift


def _times(matrix: list[int], vector: int) -> int:
    """Multiply a matrix, given by its columns, by a vector of bits."""
    product = 0
    for column in matrix:
        if vector & 1:
            product ^= column
        vector >>= 1
    return product
