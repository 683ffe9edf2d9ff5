"""Frequency of log lines while loading."""

from services.worker.weights.progress import LINE_S, ProgressLines


def test_progress_is_logged_now_and_then_and_not_where_loading_is_soon_done():
    lines = ProgressLines(now_s=100)
    times = [100 + LINE_S * tenths / 10 for tenths in range(35)]
    due = [now_s for now_s in times if lines.is_due(now_s)]
    assert due == [100 + LINE_S * number for number in (1, 2, 3)]
