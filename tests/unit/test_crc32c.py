"""CRC-32C against known values: RFC 3720, appendix B.4, and the definition, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from reverb_writer.files.crc32c import masked_crc32c


def by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data: bytes, crc: int) -> None:
    assert by_definition(data) == crc
    assert masked_crc32c(data) == masked(crc)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 131_072, 140_000])
def test_data_of_several_blocks(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert masked_crc32c(data) == masked(by_definition(data))
