import pytest


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' default: other tests need the cores, too."""
    monkeypatch.setenv("SHOAL_NUM_THREADS", "1")
