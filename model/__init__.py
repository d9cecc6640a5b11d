"""The one model both pools run: transformer, MoE, paged KV cache, block pool, sampling, runner, engine loop."""

import os

# Torch's OpenMP threads look for work for milliseconds after each call, on the cores that our kernels' helpers need:
# with two cores a step then takes up to half as long again. So few looks (libgomp's are some 10 ns each) that they span
# the gap between two calls of torch, which a prompt through many experts has thousands of, and no more. It is read when
# torch is loaded; packages whose modules load it first import this one.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
