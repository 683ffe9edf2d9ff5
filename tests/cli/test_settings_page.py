from cli.settings_page import PAGE, page
from shared.settings.serve import ServeConfig
from shared.settings.worker import RANK_SETTINGS


def test_docs_settings_md_matches_the_settings() -> None:
    assert PAGE.read_text() == page(), "the settings changed: run `make docs`"


def test_each_setting_stands_in_it_once() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    names = sorted(row.split("`")[1].replace("-", "_") for row in rows)
    assert names == sorted(ServeConfig.model_fields.keys() - RANK_SETTINGS)
