"""Triton kernels in its interpreter, which has to be chosen before Triton is imported: these tests
run in a process of their own, ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``."""

from kernels.dispatch import IS_INTERPRETED

collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]
