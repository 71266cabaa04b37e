"""Two sets of answers, token by token. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ffn_faas.demo.answers import Answer


@dataclass(frozen=True)
class Parting:
    """Where an answer first differs from stock's. ``gap`` is how much better stock held its own token than ours
    (natural logarithm), None when ours is not among stock's best."""

    prompt: int
    position: int
    stock_token: int
    token: int
    gap: float | None


@dataclass(frozen=True)
class Comparison:
    """``changed`` counts positions whose tokens differ; ``max_logprob_diff`` is over all log-probabilities that both
    returned, chosen and runners-up, at positions before the answers part."""

    compared: int
    changed: int
    max_logprob_diff: float
    partings: list[Parting]

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.changed == 0


def compare(answers: list[Answer], stock: list[Answer]) -> Comparison:
    """``answers`` against ``stock``, prompt by prompt. A missing token counts as changed."""
    compared = changed = 0
    largest = 0.0
    partings: list[Parting] = []
    for number, (mine, theirs) in enumerate(zip(answers, stock, strict=True)):
        length = max(len(mine.token_ids), len(theirs.token_ids))
        common = min(len(mine.token_ids), len(theirs.token_ids))
        differing = [i for i in range(common) if mine.token_ids[i] != theirs.token_ids[i]]
        compared += length
        changed += len(differing) + length - common
        alike = differing[0] if differing else common
        largest = max([largest, *(_distance(mine, theirs, i) for i in range(alike))])
        if differing:
            partings.append(_parting(number, alike, mine, theirs))
    return Comparison(compared, changed, largest, partings)


def _distance(mine: Answer, theirs: Answer, position: int) -> float:
    shared = mine.top[position].keys() & theirs.top[position].keys()
    runners_up = [abs(mine.top[position][token] - theirs.top[position][token]) for token in shared]
    return max([abs(mine.logprobs[position] - theirs.logprobs[position]), *runners_up])


def _parting(number: int, position: int, mine: Answer, theirs: Answer) -> Parting:
    token, stock_token = mine.token_ids[position], theirs.token_ids[position]
    ours_on_stock = theirs.top[position].get(f"token_id:{token}")
    gap = None if ours_on_stock is None else theirs.logprobs[position] - ours_on_stock
    return Parting(number, position, stock_token, token, gap)
