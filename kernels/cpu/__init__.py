"""Native code for CPUs: a decoder's forward pass, sampling and logprobs in a few calls.

``build.py`` compiles it at install, ``library.py`` chooses the build for this CPU, ``program.py``
and ``sampler.py`` call it. Weights are packed once, so that a GEMM of few rows reads them at memory
bandwidth. Without a library, or for models it cannot run, torch's operators compute.
"""
