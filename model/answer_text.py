"""The text of an answer as its tokens come: it ends before the first stop text, of which nothing is given out.

Read character by character, the stop text that comes to its end first counts; of several that end there, the longest.
So the text does not depend on how it is cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.sampling_params import SamplingParams
from model.tokenizer import Detokenizer, Spelling


class AnswerText:
    """What is given out follows from the tokens alone: one that starts from the tokens of another goes on exactly.

    Of an end that may be the beginning of a stop text the longest is held back, until it is known what it is.
    """

    def __init__(
        self, tokenizer: Spelling, token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams
    ) -> None:
        """`token_ids`: the prompt, then what was given out of the answer before, in which no stop text counted."""
        self._stops = sampling.stop
        known = token_ids[:num_prompt_tokens] if self._stops else token_ids
        self._detokenizer = Detokenizer(tokenizer, known, sampling.stop_token_ids)
        self._held = ""
        self._pieces: list[str] = []
        self._is_cut = False
        for token_id in token_ids[len(known) :]:
            self.push(token_id, may_stop=False)
        self._pieces.clear()

    def push(self, token_id: int, *, may_stop: bool) -> bool:
        """Whether a stop text has come to its end with this token. Without `may_stop` none counts that ends here."""
        return self._add(self._detokenizer.push(token_id), may_stop)

    def end(self) -> None:
        """After the last token: gives out what was held back, which no stop text has come of."""
        if not self._is_cut and not self._add(self._detokenizer.flush(), may_stop=True):
            self._pieces.append(self._held)

    def take(self) -> str:
        """What may be given out since this was asked last."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _add(self, piece: str, may_stop: bool) -> bool:
        if not self._stops or not piece:
            self._pieces.append(piece)
            return False
        text = self._held + piece
        place = _place_of_stop(text, len(self._held), self._stops) if may_stop else None
        self._is_cut = place is not None
        if place is None:
            place = len(text) - max(num_begun(text, stop) for stop in self._stops)
        self._pieces.append(text[:place])
        self._held = text[place:]
        return self._is_cut


def _place_of_stop(text: str, num_seen: int, stops: Sequence[str]) -> int | None:
    """Where the stop text begins that ends first, behind the first `num_seen` characters; None if none does."""
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, num_seen - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), begin))
    return min(found)[1] if found else None


def num_begun(text: str, stop: str) -> int:
    """The length of the longest end of a text, which is not empty, that a stop text begins with and goes on behind."""
    length = min(len(stop) - 1, len(text))
    while (length := stop.rfind(text[-1], 0, length) + 1) > 0:
        if text.endswith(stop[:length]):
            return length
        length -= 1
    return 0
