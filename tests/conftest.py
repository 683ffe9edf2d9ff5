"""Settings of all tests. No test has a deadline: the machine may be busy with something else."""

from hypothesis import HealthCheck, settings

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shoal")
