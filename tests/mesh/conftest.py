import pytest


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers that say nothing else: other tests want the cores, too."""
    monkeypatch.setenv("SHOAL_NUM_THREADS", "1")
