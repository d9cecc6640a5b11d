from __future__ import annotations

import random
from collections import Counter

from model.text_counts import CountedText


def test_tokens_are_counted_in_the_output_alone() -> None:
    draw = random.Random(0)
    for _ in range(300):
        prompt, output, further = (draw.choices(range(10), k=draw.randrange(least, 12)) for least in (1, 0, 0))
        text = CountedText.of([*prompt, *output], len(prompt))
        for more in (further, []):  # and the text is as it was
            token_ids, counts = text.with_output(more)
            written = [*output, *more]
            assert len(token_ids) == len({*prompt, *written})
            expected = {token: Counter(written)[token] for token in {*prompt, *written}}
            assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == expected
