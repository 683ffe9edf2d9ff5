"""Time slices of the kernel's scheduler, in a process of their own."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process import slices

HAS_SLICES = platform.machine() == "x86_64" and tuple(
    map(int, platform.release().split("-")[0].split(".")[:2])
) >= (6, 12)
MORE_NICE = 3
CODE = f"""
import ctypes, os, threading
from shared.process.slices import ATTRIBUTES, THREADS, shorten_slices

def of(thread):
    found = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert not ctypes.CDLL(None).syscall(315, thread, found, ATTRIBUTES.size, 0)
    _, _, _, nice, _, slice_ns, _, _ = ATTRIBUTES.unpack(found)
    return slice_ns, nice

event = threading.Event()
threading.Thread(target=event.wait, daemon=True).start()
os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + {MORE_NICE})
before = {{of(int(each.name))[0] for each in THREADS.iterdir()}}
shorten_slices()
threading.Thread(target=event.wait, daemon=True).start()
print(before, sorted(of(int(each.name)) for each in THREADS.iterdir()))
"""


@pytest.mark.skipif(not HAS_SLICES, reason="a slice for each thread needs Linux 6.12 on x86-64")
def test_all_threads_and_their_successors_have_short_slices_and_keep_their_nice() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    before, after = found.stdout.split("} ")
    assert f"{slices.SLICE_NS}" not in before
    more = os.nice(0) + MORE_NICE
    expected = [(slices.SLICE_NS, nice) for nice in (os.nice(0), more, more)]
    assert after == f"{expected}\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the syscall's number is not known")
def test_a_refusal_is_logged_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(slices, "_SCHED_SETATTR", 1_000_000)
    slices.shorten_slices()
    assert "stays as it is: Function not implemented" in caplog.text


def test_a_thread_that_has_just_ended_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / f"{1 << 30}").mkdir()  # above the kernel's limit
    monkeypatch.setattr(slices, "THREADS", tmp_path)
    slices.shorten_slices()
    assert ("No such process" in caplog.text) == (platform.machine() == "x86_64")


def test_another_machine_keeps_its_slices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slices, "THREADS", tmp_path / "missing")
    monkeypatch.setattr("os.uname", lambda: platform.uname()._replace(machine="aarch64"))
    slices.shorten_slices()
