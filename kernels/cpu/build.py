"""Compiles the native code, once for each kind of CPU. Needs nothing but Python and a C++ compiler.

    python kernels/cpu/build.py [FOLDER]

``pip install`` runs it; FOLDER is where the libraries go, by default beside the sources. The
compiler is $CXX, else the system's, else that of the package ``ziglang``.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent
# By the name of a library: the level of x86-64 and the features that it is for.
VARIANTS = {"avx512bf16": ("v4", ["avx512bf16"]), "avx512": ("v4", []), "avx2": ("v3", [])}
ZIG = [sys.executable, "-m", "ziglang", "cc"]
FLAGS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-fno-sanitize=undefined", "-Wno-maybe-uninitialized"),
]


class BuildError(Exception):
    """There will be no native code, and this is why."""


def is_for_us() -> bool:
    """Whether the code is for machines of this kind."""
    return (platform.system(), platform.machine()) == ("Linux", "x86_64")


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler, or None."""
    if chosen := os.environ.get("CXX"):
        return chosen.split()
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    return ZIG if find_spec("ziglang") else None


def library_name(variant: str) -> str:
    """Names the sources that it is made of too, so that no other is ever loaded."""
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[hc]*")))
    return f"shoal_{variant}_{hashlib.sha256(sources).hexdigest()[:12]}.so"


def build(folder: Path) -> list[Path]:
    """The libraries, compiled into ``folder``. Raises BuildError."""
    if not is_for_us():
        raise BuildError(f"no native code for {platform.system()} on {platform.machine()}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++, clang++ or the package ziglang")
    libraries = [_compile(compiler, folder, name) for name in VARIANTS]
    for other in set(folder.glob("shoal_*.so")) - set(libraries):
        other.unlink()
    return libraries


def _compile(compiler: list[str], folder: Path, variant: str) -> Path:
    library = folder / library_name(variant)
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    unfinished = library.with_suffix(".tmp")
    flags = [*FLAGS, *_machine_flags(compiler, variant)]
    command = [*compiler, *flags, *sources, "-o", str(unfinished)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{compiler[0]} does not start: {error}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
    return unfinished.rename(library)


def _machine_flags(compiler: list[str], variant: str) -> list[str]:
    level, features = VARIANTS[variant]
    if compiler == ZIG:
        return ["-mcpu=" + "+".join([f"x86_64_{level}", *features])]
    return [f"-march=x86-64-{level}", *(f"-m{feature}" for feature in features)]


if __name__ == "__main__":
    for made in build(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES):
        print(made.name)
