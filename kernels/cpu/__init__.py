"""Native code for CPUs: what a decoder computes in a step, and what is made of its logits, in a few
calls.

``build.py`` compiles it at install, ``library.py`` chooses the build for this CPU, ``program.py``
and ``sampler.py`` call it. Weights are packed once, so that a product of few rows reads them as
fast as the memory gives them. Where there is no library, or it cannot run a model, torch's
operators do.
"""
