"""Engines compute with one thread, as in all tests of the worker."""

from tests.services.worker.conftest import _one_thread

__all__ = ["_one_thread"]
