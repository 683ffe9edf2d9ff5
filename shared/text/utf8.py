"""Characters split between tokens."""

MAX_CHAR_BYTES = 4
_LENGTHS = ((0xC2, 0xDF, 2), (0xE0, 0xEF, 3), (0xF0, 0xF4, 4))


def num_half_bytes(data: bytes) -> int:
    """The number of bytes at the end of ``data`` that begin an incomplete character."""
    for num in range(1, min(MAX_CHAR_BYTES, len(data) + 1)):
        byte = data[-num]
        if byte & 0xC0 != 0x80:
            lengths = (length for first, last, length in _LENGTHS if first <= byte <= last)
            return num if next(lengths, 1) > num else 0
    return 0
