"""Compiles the native code when the package is installed; without it Shoal runs on torch alone."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("kernels/cpu")
COMPILER = "ziglang>=0.13,<1"


class NativeCode(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        """A compiler for machines that have none."""
        builder = self._builder()
        return [COMPILER] if builder.is_for_us() and not builder.find_compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = self._builder()
        folder = Path(self.root) / FOLDER
        # Other variants are for packages that travel, and for tests.
        cpus = "best" if version == "editable" else "all"
        try:
            libraries = builder.build(folder, self._warn, cpus)
        except builder.BuildError as error:
            self._warn(f"{error}; CPUs will compute with torch alone")
            return
        build_data["artifacts"] += [str(FOLDER / library.name) for library in libraries]
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _warn(self, problem: str) -> None:
        self.app.display_warning(f"native code: {problem}")

    def _builder(self) -> Any:
        """The module ``kernels/cpu/build.py``, which needs nothing of the package."""
        spec = spec_from_file_location("native_build", Path(self.root) / FOLDER / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
