"""A certificate for tests."""

import subprocess
from pathlib import Path

import pytest

COMMAND = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
           "-subj", "/CN=shoal", "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip


def make_certificate(file: Path) -> None:
    """Writes a key and its own certificate, for this machine's loopback address."""
    try:
        done = subprocess.run([*COMMAND, "-keyout", "-", "-out", "-"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert done.returncode == 0, done.stderr
    file.write_bytes(done.stdout)
