"""How the native code is compiled and found."""

from pathlib import Path

import pytest

from kernels.cpu import build, library


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
        (" ".join(sorted(library.NEEDS["avx512"])), ["avx512", "avx2"]),
    ],
)
def test_a_cpu_gets_what_it_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, expected: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(library, "CPUINFO", tmp_path / "cpuinfo")
    assert library.variants() == expected


def test_a_compiler_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(build.BuildError, match="no-such-compiler does not start"):
        build.build(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo broken >&2; exit 3'")
    with pytest.raises(build.BuildError, match="failed"):
        build.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_any_compiler_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.build(tmp_path)
