"""The step thread's waits for the scheduler, and steps without a wait."""

from services.worker.engine.host import IdleTime


def test_the_time_between_steps_counts_while_sequences_are_open():
    idle = IdleTime()
    assert idle.begin_step(5.0) == 0, "nothing ran before"
    idle.end_step(6.0, num_open=2)
    assert idle.begin_step(6.5) == 0.5
    idle.end_step(7.0, num_open=0)
    assert idle.begin_step(100.0) == 0, "no plan was to be expected"


def test_a_lost_scheduler_is_not_waited_for():
    idle = IdleTime()
    idle.end_step(1.0, num_open=1)
    idle.forget()
    assert idle.begin_step(60.0) == 0
