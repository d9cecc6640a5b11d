"""The same measurement for vLLM, run by bench.engine in an interpreter that has it; imports nothing of ours.

Arguments: the model's folder and the sizes as JSON. A step is what each further token adds to a batch.
Prints a JSON line last: seconds by row.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

STEPS = 24
ROUNDS = 5


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, enough; it would take most of the memory there is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    folder, sizes = sys.argv[1], json.loads(sys.argv[2])
    batches, prompt_tokens = sizes["batches"], sizes["prompt_tokens"]
    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=prompt_tokens + 2 * STEPS,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(batches) * prompt_tokens,
        enable_prefix_caching=False,
    )

    def seconds(num_prompts: int, num_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [3 + (7919 * row + 31 * i) % 40000 for i in range(prompt_tokens)]}
            for row in range(num_prompts)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    def median(num_prompts: int, num_tokens: int) -> float:
        seconds(num_prompts, num_tokens)
        return statistics.median(seconds(num_prompts, num_tokens) for _ in range(ROUNDS))

    rows = {f"b{batch}": (median(batch, 1 + STEPS) - median(batch, 1)) / STEPS for batch in batches}
    rows["prefill"] = median(sizes["prefill_prompts"], 1)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
