"""Reads a batch file once before any request is sent."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from shared.batch.lines import LineError, parse_line, read_lines

MAX_ERRORS = 100
DIGEST_BYTES = 8


@dataclass(slots=True)
class Checked:
    """Summary of a file. ``digest`` identifies its content. ``errors`` are the first ``MAX_ERRORS``
    invalid lines; ``duplicates`` repeat an id."""

    digest: str = ""
    num_requests: int = 0
    num_lines: int = 0
    num_errors: int = 0
    errors: list[LineError] = field(default_factory=list)
    duplicates: list[LineError] = field(default_factory=list)


def check(path: Path, max_line_bytes: int, endpoint: str | None = None) -> Checked:
    """Ignores blank lines. Takes 8 bytes of memory per line, to find duplicate ids. Raises
    OSError."""
    checked, digest = Checked(), blake2b(digest_size=DIGEST_BYTES)
    hashes = array("q")
    for text in read_lines(path, max_line_bytes, digest.update):
        line = parse_line(text, max_line_bytes, endpoint)
        checked.num_lines = text[0]
        checked.num_requests += 1
        if line.custom_id is not None:
            hashes.append(hash(line.custom_id))
        if isinstance(line, LineError):
            checked.num_errors += 1
            if checked.num_errors <= MAX_ERRORS:
                checked.errors.append(line)
    checked.digest = digest.hexdigest()
    if repeated := _repeated(hashes):
        checked.duplicates = [*_duplicates(path, max_line_bytes, endpoint, repeated)]
    return checked


def _repeated(hashes: "array[int]") -> set[int]:
    """At most ``MAX_ERRORS`` hashes that occur more than once. Sorts ``hashes``."""
    if not hashes:
        return set()
    ordered = np.frombuffer(hashes, np.int64)
    ordered.sort()
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return set(again[:MAX_ERRORS].tolist())


def _duplicates(
    path: Path, max_line_bytes: int, endpoint: str | None, repeated: set[int]
) -> Iterator[LineError]:
    """Lines with the id of an earlier line; equal hashes are compared by id."""
    first: dict[str, int] = {}
    num = 0
    for text in read_lines(path, max_line_bytes):
        line = parse_line(text, max_line_bytes, endpoint)
        custom_id = line.custom_id
        if custom_id is None or hash(custom_id) not in repeated or num == MAX_ERRORS:
            continue
        number = text[0]
        earlier = first.setdefault(custom_id, number)
        if earlier != number:
            num += 1
            message = f"custom_id {custom_id[:60]!r} is in line {earlier} and in line {number}"
            yield LineError(number, "duplicate_custom_id", message, "custom_id", custom_id)
