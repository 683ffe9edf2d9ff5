"""Compiles the native code once for each kind of CPU. Needs only Python and a C++ compiler.

python kernels/cpu/build.py [--cpus all|this|best] [FOLDER]

``pip install`` runs it for all CPUs, an editable installation for the best variant of this CPU.
FOLDER receives the libraries, by default the folder of the sources. The compiler is $CXX, else the
system's, else that of the package ``ziglang``.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

SOURCES = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")


class Variant(NamedTuple):
    """The CPUs a library is for: a level of x86-64, and further features. ``flags``: all of them,
    as /proc/cpuinfo names them."""

    level: str
    flags: set[str]
    features: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()


# The flags of levels are those of the ABI.
_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_NARROW = _VNNI | {"avx512_bf16"}
_AMX = _NARROW | {"amx_tile", "amx_bf16"}
NARROW = ("avx512bf16", "avx512vnni")  # no CPU has avx512bf16 alone
# Best first.
VARIANTS = {
    "amx": Variant("v4", _AMX, (*NARROW, "amx-tile", "amx-bf16"), ("SHOAL_TILES",)),
    "avx512bf16": Variant("v4", _NARROW, NARROW),
    "avx512vnni": Variant("v4", _VNNI, ("avx512vnni",)),
    "avx512": Variant("v4", _V4),
    "avx2": Variant("v3", _V3),
}
ZIG = [sys.executable, "-m", "ziglang", "cc"]
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    "-ffp-contract=off",  # the sources alone decide which operations are fused
    *("-fno-exceptions", "-fno-rtti", "-fno-sanitize=undefined", "-Wno-maybe-uninitialized"),
]


class BuildError(Exception):
    """No native library could be built; the message is the reason."""


def is_for_us() -> bool:
    """True on Linux and x86-64, the platform of the native code."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64")


def for_this_cpu() -> list[str]:
    """The names of the variants this CPU has the features for, best first. Intel's bfloat16
    instructions multiply at half of float32's speed (measured on Emerald Rapids)."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())
    found = [name for name, variant in VARIANTS.items() if variant.flags <= flags]
    if "avx512bf16" in found and any("GenuineIntel" in line for line in lines):
        at = found.index("avx512bf16")
        found[at : at + 2] = found[at + 1], found[at]
    return found


def best_for_this_cpu() -> list[str]:
    """The best variant, and the next one if it is AMX's, which a kernel may refuse to processes."""
    names = for_this_cpu()
    return names[: 2 if names[:1] == ["amx"] else 1]


CPUS: dict[str, Callable[[], Iterable[str]]] = {
    "all": lambda: VARIANTS,
    "this": for_this_cpu,
    "best": best_for_this_cpu,
}


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler, or None."""
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    return ZIG if find_spec("ziglang") else None


def library_name(variant: str) -> str:
    """The file name of a library, with a hash of its sources and flags so that an outdated one is
    never loaded."""
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[hc]*")))
    digest = hashlib.sha256(sources + " ".join(FLAGS).encode()).hexdigest()
    return f"shoal_{variant}_{digest[:12]}.so"


def build(folder: Path, warn: Callable[[str], None], cpus: str = "all") -> list[Path]:
    """Compiles the variants of CPUS that ``folder`` lacks, and returns the paths of all. A compiler
    may be too old for the newest; ``warn`` receives a message for each. Raises BuildError without
    any library."""
    if not is_for_us():
        raise BuildError(f"no native code for {platform.system()} on {platform.machine()}")
    variants = {name: folder / library_name(name) for name in CPUS[cpus]()}
    missing = [name for name, library in variants.items() if not library.exists()]
    for problem in _compile(missing, folder) if missing else ():
        warn(problem)
    current = {library_name(name) for name in VARIANTS}
    for library in folder.glob("shoal_*.so"):
        if library.name not in current:
            library.unlink()
    libraries = [library for library in variants.values() if library.exists()]
    if not libraries:
        raise BuildError("the compiler builds no variant" if variants else "this CPU has no AVX2")
    return libraries


def _compile(variants: Iterable[str], folder: Path) -> Iterator[str]:
    """Yields the problem of each variant that could not be compiled. Raises BuildError."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++, clang++ or the package ziglang")
    with (
        TemporaryDirectory() as objects,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        compiled = {
            name: [
                threads.submit(_compile_source, compiler, name, source, Path(objects))
                for source in sorted(SOURCES.glob("*.cpp"))
            ]
            for name in variants
        }
        for name, parts in compiled.items():
            library = folder / library_name(name)
            unfinished = library.with_suffix(".tmp")
            try:
                paths = [each.result() for each in parts]
                _run([*compiler, *FLAGS, "-shared", *paths, "-o", unfinished])
            except BuildError as error:
                yield f"no {name}: {error}"
            else:
                unfinished.rename(library)


def _compile_source(compiler: list[str], variant: str, source: Path, folder: Path) -> Path:
    made = folder / f"{variant}.{source.stem}.o"
    flags = [*FLAGS, *_machine_flags(compiler, VARIANTS[variant])]
    _run([*compiler, *flags, "-c", source, "-o", made])
    return made


def _run(command: list[str | Path]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not start: {error}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))} failed:\n{done.stderr}")


def _machine_flags(compiler: list[str], variant: Variant) -> list[str]:
    defines = [f"-D{name}" for name in variant.defines]
    if compiler == ZIG:
        names = [feature.replace("-", "_") for feature in variant.features]
        return ["-mcpu=" + "+".join([f"x86_64_{variant.level}", *names]), *defines]
    features = [f"-m{feature}" for feature in variant.features]
    return [f"-march=x86-64-{variant.level}", *features, *defines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCES)
    parser.add_argument("--cpus", choices=CPUS, default="all")
    arguments = parser.parse_args()
    for made in build(arguments.folder, lambda it: print(it, file=sys.stderr), arguments.cpus):
        print(made.name)
