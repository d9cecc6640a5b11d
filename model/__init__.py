"""The one model both pools run: transformer, MoE, paged KV cache, block pool, sampling, runner, engine loop."""
