"""The worker: weights, KV cache, forward pass and sampling, one step at a time."""

import os

# Before torch is imported: OpenMP threads that spin after each parallel region occupy the cores
# needed by the others. On two shared cores a small GEMM then takes 8 ms instead of 0.05.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
