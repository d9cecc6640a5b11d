"""One request of a trace: when it came and how long it was, not what it said."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX_BLOCK_TOKENS = 512  # what an id of `prefix_blocks` stands for, as in Mooncake's traces


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`prefix_blocks` name the full blocks that its prompt begins with: equal ids stand for equal text up to there.
    `slo_class`: what it was promised; empty for the default one."""

    at_s: float  # since the trace began
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    slo_class: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.at_s < float("inf"):
            raise ValueError(f"at_s is {self.at_s}; it must be 0 or more")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        most = self.num_prompt_tokens // PREFIX_BLOCK_TOKENS
        if len(self.prefix_blocks) > most:
            raise ValueError(
                f"prefix_blocks has {len(self.prefix_blocks)} blocks; {self.num_prompt_tokens} tokens fill {most}"
            )
