"""The file of a gateway's API keys."""

from pathlib import Path

import pytest

from services.gateway.http.api_keys import load_accounts
from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig


def test_a_key_that_is_listed_twice_is_refused_by_its_line_and_not_quoted(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("secret max-open-requests=2\nother\n\nsecret\n")
    with pytest.raises(ConfigError, match=r"keys, line 4: an earlier line has the same key") as it:
        load_accounts(GatewayConfig(api_key_file=path))
    assert "secret" not in str(it.value)
