"""The alert rules and the board: both parse, and every queried metric is exported."""

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from benchmarks.harness.docker_engine import ROOT
from tests.compose.board import BOARD, Panel, panels, queries
from tests.compose.exported import assert_exported

PROMETHEUS = ROOT / "compose" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
EXPRESSIONS = queries() + [rule["expr"] for rule in RULES]


def promtool(*arguments: str | Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def overlap(one: Panel, other: Panel) -> bool:
    a, b = one["gridPos"], other["gridPos"]
    is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
    is_above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    return not (is_beside or is_above)


def test_prometheus_takes_its_configuration():
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_when_a_limit_is_broken_and_are_silent_otherwise():
    promtool("test", "rules", PROMETHEUS / "rules_test.yml")


def test_each_alert_is_fired_by_a_test():
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


def test_each_alert_names_its_section_in_the_documentation():
    page = (ROOT / "docs" / "alerts.md").read_text()
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_prometheus_understands_the_queries_of_the_board(tmp_path: Path):
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", path)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_of_a_query_is_exported(expression: str):
    assert_exported(expression)


def test_panels_of_the_board_have_an_id_a_place_and_a_query_of_their_own():
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for one, other in combinations(panels(), 2):
        assert not overlap(one, other), (one["title"], other["title"])
    for panel in panels():
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(references)) == len(references)
        if panel["type"] != "row":
            assert references, panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_the_board_asks_the_source_that_grafana_is_provisioned_with():
    folder = BOARD.parent.parent / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    (variable,) = json.loads(BOARD.read_text())["templating"]["list"]
    assert source["type"] == variable["query"] == "prometheus"
    assert source["isDefault"]
    used = {panel["datasource"]["uid"] for panel in panels() if panel["type"] != "row"}
    assert used == {"${" + variable["name"] + "}"}
