"""Clients for Node, by the expectations in ``node``."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "node"
TIMEOUT_S = 120

pytestmark = [
    pytest.mark.skipif(not shutil.which("node"), reason="node is not installed"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules").exists(),
        reason="`make test-clients` found no npm that could install the clients for Node",
    ),
]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.test.js")))
def test_its_expectations_are_met(url: str, pooling_url: str, name: str):
    found = subprocess.run(
        ["node", "--test", name],
        cwd=FOLDER,
        env=os.environ | {"SHOAL_POOLING_URL": pooling_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert found.returncode == 0, found.stdout
