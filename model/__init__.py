"""The one model both pools run: transformer, MoE, paged KV cache, block pool, sampling, runner, engine loop."""

import os

# Torch's OpenMP threads look for work for milliseconds after each call, on the cores that our kernels' helpers need:
# with two cores a step then takes up to half as long again. It is read when torch is loaded; packages whose modules
# load it first import this one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
