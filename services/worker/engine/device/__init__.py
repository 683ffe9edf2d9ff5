"""The engine of GPUs: what a step needs of the one before stays on the device, so that the next
one is launched while it runs, and steps that only decode are replayed as CUDA graphs."""
