"""The worker of ``benchmarks/front.py``."""

from benchmarks.fake_worker import InstantEngine
from services.scheduler.intake import why_refused
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Hello


def test_the_scheduler_does_not_refuse_it():
    engine = InstantEngine(WorkerConfig())
    hello = Hello(1, 0, "worker", "w", engine.model_info, engine.capacity)
    assert why_refused(hello, []) is None
