"""The engine of GPUs. The state that steps share stays on the device, so a step is launched while
the step before runs. Decode steps are replayed as CUDA graphs."""
