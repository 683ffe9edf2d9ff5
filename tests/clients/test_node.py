"""Clients for Node, by the expectations in ``node``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parent / "node"
NODE_TIMEOUT_S = 120

needs_node = pytest.mark.skipif(
    not shutil.which("node") or not (NODE / "node_modules").exists(),
    reason="node is not installed, or `make test-clients` found no npm that could install clients",
)


@needs_node
@pytest.mark.parametrize("name", sorted(path.name for path in NODE.glob("*.test.js")))
def test_its_expectations_are_met(url: str, pooling_url: str, name: str):
    found = subprocess.run(
        ["node", "--test", name],
        cwd=NODE,
        env=os.environ | {"SHOAL_POOLING_URL": pooling_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=NODE_TIMEOUT_S,
    )
    assert found.returncode == 0, found.stdout
