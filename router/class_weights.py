"""What ratios are worth where requests are of several SLO classes. Pure.

A ratio is worth the share of all requests that meet the SLOs of their class, and above that it counts how far each
class gets of the share that is promised to it: `LACKING` times the mean over classes. Classes count alike there, since
a promise does not become less for being made to few; beyond its share a class counts by its requests alone. As the
weight is large, what is found is the most goodput under which every class has its share, wherever there is such a
ratio, and else the least that is lacking. Where there is only one class nothing is to be weighed, and nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from router.outcomes import Slo
from router.replay import Expected

LACKING = 4.0  # of what all requests together are worth
_LEAST_REQUESTS = 20  # that are expected of a class: whether fewer got their share is chance


class ClassWeights:
    """Of these requests. `named`: the SLOs of classes by name; any other name is of the default class, with `slo`.

    `scores`, here and below, are those of `router.replay.Played`, by request; 1 for one that met its SLOs.
    """

    def __init__(self, slo: Slo, named: Mapping[str, Slo], expected: Sequence[Expected]) -> None:
        self.slos = [named.get(each.slo_class, slo) for each in expected]
        members: dict[str, list[int]] = {}
        for index, each in enumerate(expected):
            members.setdefault(each.slo_class if each.slo_class in named else "", []).append(index)
        self._members = dict(sorted(members.items()))  # the default class first
        judged = {name: of for name, of in self._members.items() if len(of) >= _LEAST_REQUESTS}
        self._judged = judged if len(judged) > 1 else {}
        self._shares = {name: named.get(name, slo).share for name in self._judged}

    @property
    def has_several(self) -> bool:
        return len(self._members) > 1

    def attainments(self, scores: Sequence[float]) -> dict[str, float]:
        """By class, the share that met their SLOs."""
        return {name: _attainment(scores, members) for name, members in self._members.items()}

    def worth(self, scores: Sequence[float]) -> float:
        return fmean(scores) + self.kept(scores)

    def kept(self, scores: Sequence[float]) -> float:
        """What the promised shares are worth that classes have got; 0 if there is one class."""
        if not self._judged:
            return 0.0
        of_each = [min(_attainment(scores, of), self._shares[name]) for name, of in self._judged.items()]
        return LACKING * fmean(of_each)

    def scale(self, scores: Sequence[float]) -> float:
        """How much a request counts in the mean, as it is by these scores. Gains are divided by it: where all classes
        fall short, a share more of the requests that meet their SLOs is a gain of that share, as with one class."""
        if not self._judged:
            return 1.0
        short = sum(_attainment(scores, of) < self._shares[name] for name, of in self._judged.items())
        return 1.0 + LACKING * short / len(self._judged)

    def gains(self, before: Sequence[float], after: Sequence[float]) -> list[float]:
        """By request, so that their mean is the difference in `worth`."""
        gains = [new - old for old, new in zip(before, after, strict=True)]
        for name, members in self._judged.items():
            old, new = _attainment(before, members), _attainment(after, members)
            share = self._shares[name]
            counted = (min(new, share) - min(old, share)) / (new - old) if new != old else float(new < share)
            weight = LACKING * counted * len(gains) / (len(self._judged) * len(members))
            for index in members:
                gains[index] += weight * ((after[index] == 1.0) - (before[index] == 1.0))
        return gains


def _attainment(scores: Sequence[float], members: Sequence[int]) -> float:
    return sum(scores[index] == 1.0 for index in members) / len(members)
