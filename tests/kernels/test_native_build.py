"""Compilation and discovery of the native code."""

import re
from pathlib import Path

import pytest

from kernels.cpu import build, library

SYSTEM_HEADER = re.compile(r"^#include <(.+)>", re.MULTILINE)


def test_every_build_is_there_and_the_best_is_taken() -> None:
    """As the README promises after its two commands."""
    assert library.variants(), "a CPU of x86-64 that is older than 2013"
    assert library.find_variant() == library.variants()[0]


def test_without_a_build_of_these_sources_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "shoal_avx2_000000000000.so").touch()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert library.find_variant() is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu abm avx avx2 bmi1 bmi2 f16c fma movbe", ["avx2"]),
        ("fpu sse2", []),
        (" ".join(sorted(build.VARIANTS["avx512"].flags)), ["avx512", "avx2"]),
    ],
)
def test_a_cpu_gets_the_variants_it_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, expected: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    assert library.variants() == expected


@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("AuthenticAMD", ["avx512bf16", "avx512vnni", "avx512", "avx2"]),
        ("GenuineIntel", ["avx512vnni", "avx512bf16", "avx512", "avx2"]),
    ],
)
def test_bfloat16_instructions_come_second_on_intel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, expected: list[str]
) -> None:
    flags = " ".join(build.VARIANTS["avx512bf16"].flags)
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\nflags : {flags}\n")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    assert build.for_this_cpu() == expected


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("avx2", ["avx2"]), ("avx512bf16", ["avx512bf16"]), ("amx", ["amx", "avx512bf16"])],
)
def test_a_server_gets_the_best_variant_and_one_for_a_kernel_without_amx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant: str, expected: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {' '.join(build.VARIANTS[variant].flags)}\n")
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    assert build.best_for_this_cpu() == expected


def test_current_libraries_are_kept_and_outdated_ones_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "for_this_cpu", lambda: ["avx512", "avx2"])
    made = {tmp_path / build.library_name(name) for name in ("amx", "avx512")}
    for path in (*made, tmp_path / "shoal_avx2_000000000000.so"):
        path.touch()
    assert build.build(tmp_path, pytest.fail, "best") == [tmp_path / build.library_name("avx512")]
    assert {*tmp_path.iterdir()} == made


def test_a_cpu_without_a_variant_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "no such file")
    with pytest.raises(build.BuildError, match="this CPU has no AVX2"):
        build.build(tmp_path, pytest.fail, "this")


def test_a_compiler_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    problems: list[str] = []
    with pytest.raises(build.BuildError, match="no variant"):
        build.build(tmp_path, problems.append)
    assert all("no-such-compiler does not start" in problem for problem in problems)
    assert len(problems) == len(build.VARIANTS)


def test_a_compiler_that_is_too_old_for_a_build_is_quoted_and_makes_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nfor output; do :; done\n: > "$output"\n'
        'case "$*" in *amx*) echo never heard of it >&2; exit 3;; esac\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    problems: list[str] = []
    folder = tmp_path / "made"
    folder.mkdir()
    found = build.build(folder, problems.append)
    assert [path.name for path in found] == [
        build.library_name(name) for name in build.VARIANTS if name != "amx"
    ]
    assert set(folder.iterdir()) == set(found)
    (problem,) = problems
    assert problem.startswith("no amx: ")
    assert "never heard of it" in problem


def test_sources_need_headers_of_c_alone() -> None:
    """The compiler of the package ziglang comes without the C++ library."""
    sources = [*build.SOURCES.glob("*.h"), *build.SOURCES.glob("*.cpp")]
    headers = {name for path in sources for name in SYSTEM_HEADER.findall(path.read_text())}
    assert headers
    assert {name for name in headers if not name.endswith(".h")} == set()


def test_without_any_compiler_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.build(tmp_path, pytest.fail)
