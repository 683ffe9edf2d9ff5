import json

from cli.collect_env import main
from kernels.cpu.library import find_variant


def test_it_lists_versions_and_settings_but_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_PORT", "9000")
    monkeypatch.setenv("SHOAL_API_KEY", "sesame")
    monkeypatch.setenv("SHOAL_PASSWORT", "sesame")
    assert main(["--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "sesame" not in text
    assert found["settings"]["SHOAL_PORT"] == "9000"
    assert {"SHOAL_API_KEY", "SHOAL_PASSWORT"} <= found["settings"].keys()
    assert found["native_code"]["chosen"] == find_variant()
    assert found["packages"]["pyzmq"]
    assert found["memory_mib"]["total"] > 0
    assert main([]) == 0
    assert "sesame" not in capsys.readouterr().out
    assert main(["--fish"]) == 2
