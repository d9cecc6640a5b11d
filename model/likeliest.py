"""The likeliest tokens of rows of scores, for who drafts several: the seam, and its plain torch form.

Letters: R rows, D scores of a row, C tokens that are wanted, at most D.
"""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor


class Likeliest(Protocol):
    def __call__(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """float32 [R, D] -> columns [R, C] int64, the likeliest first, and their logprobs [R, C] under the softmax of
        the row.

        Where fewer are above -infinity, the logprobs of the rest are -infinity and their columns any. A row with NaN or
        infinity has logprobs of NaN.
        """
        ...


def torch_likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    highest, columns = scores.topk(min(count, scores.shape[1]))
    most = scores.amax(dim=-1, keepdim=True)  # which carries NaN along
    logprobs = highest - most - (scores - most).exp().sum(dim=-1, keepdim=True).log()
    return columns, logprobs.where(highest > -math.inf, -math.inf).where(most < math.inf, math.nan)
