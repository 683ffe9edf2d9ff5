"""The row of a request's options, and the hash that it begins block hashes with."""

from typing import Any

import pytest
from msgspec import Raw
from msgspec.msgpack import encode
from msgspec.structs import replace

from shared.errors import CodecError
from shared.wire.envelope import (
    MAX_OPTION_BYTES,
    Promise,
    RequestOptions,
    hash_root,
    read_options,
    write_options,
)

OPTIONS = RequestOptions(
    priority=-7,
    salt="k s",
    owner="k",
    is_traced=True,
    num_worker_deaths=1,
    left_scheduler="s1",
    promise=Promise(ttft_ms=300.0, tpot_ms=20.0),
    retention_s=300,
)


def test_reading_inverts_writing():
    for options in (OPTIONS, RequestOptions()):
        assert read_options(write_options(options)) == options


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("salt", "Expected `array`"),
        (None, "Expected `array`"),
        ([2**31], "<= 2147483647"),
        ([0, "x" * 257], "length <= 256"),
        ([0, "", "", 1], "Expected `bool`"),
        ([0, "", "", False, -1], ">= 0"),
        ([0, "", "", False, 0, "", "soon"], r"Expected `array \| null`"),
        ([0, "", "", False, 0, "", [0.0]], "> 0"),
        ([0, "", "", False, 0, "", [None, 86_400_001.0]], "<= 86400000"),
        ([0, "", "", False, 0, "", "x" * MAX_OPTION_BYTES], "the limit is 65536"),
    ],
)
def test_a_bad_row_is_refused(row: Any, why: str):
    with pytest.raises(CodecError, match=why):
        read_options(Raw(encode(row)))


@pytest.mark.parametrize("row", [b"", b"\xc1", b"\x96\x00", b"\x92\x00\xa1\xff"])
def test_bytes_that_are_no_row_are_refused(row: bytes):
    with pytest.raises(CodecError):
        read_options(Raw(row))


def test_the_root_depends_on_the_salt_alone():
    assert hash_root(OPTIONS) == hash_root(RequestOptions(salt="k s"))
    assert hash_root(OPTIONS) != hash_root(replace(OPTIONS, salt="k"))
    assert len(hash_root(OPTIONS)) == 16
