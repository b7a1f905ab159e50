"""Large texts inside a page: deflated, seven bits of them in each character.

plotly.js is 4.8 MB and deflates to 1.5. HTML holds text, of which UTF-8 makes one byte only for the
128 characters of ASCII: seven bits are the most that a byte of a page can carry (base64: six).
Three characters would not come through: NUL and CR, which a parser changes, and `<`, which could
end the element. They are written as the character 256 further on, with the same low seven bits.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

_MOVED = {code: chr(256 + code) for code in (0, 13, ord("<"))}


class Packed(NamedTuple):
    size: int
    """Bytes of the deflated text; what follows them in the last character is nothing."""
    text: str


def packed(text: str) -> Packed:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = squeeze.compress(text.encode("utf-8", errors="replace")) + squeeze.flush()
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
    bits = np.append(bits, np.zeros(-len(bits) % 7, dtype=np.uint8)).reshape(-1, 7)
    codes = np.packbits(np.pad(bits, ((0, 0), (1, 0))), axis=1).tobytes()
    return Packed(len(data), codes.decode("ascii").translate(_MOVED))


def unpacked(text: str, size: int) -> str:
    """As report.js reads it."""
    codes = np.array([ord(character) & 127 for character in text], dtype=np.uint8)
    bits = np.unpackbits(codes[:, None], axis=1)[:, 1:].reshape(-1)
    data = np.packbits(bits).tobytes()[:size]
    return zlib.decompress(data, -15).decode("utf-8")
