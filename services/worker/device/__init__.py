"""The engine of GPUs. What a step needs of the one before stays on the device, so that the next step
is launched while it runs, and steps that only decode are replayed as CUDA graphs."""
