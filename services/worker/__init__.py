"""The worker: weights, KV cache, forward pass and sampling behind one step at a time."""

import os

# Before torch is imported: threads that spin at the end of each parallel region take the cores
# that they wait for. On two shared cores a small product then takes 8 ms instead of 0.05.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
