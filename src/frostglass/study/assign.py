"""Who sees which item, and in which order: each item is shown to equally many people."""

from collections import Counter
from collections.abc import Sequence

import torch

from frostglass.study.folder import Item, Trial

EARLY = 5  # the first attention check is among so many trials


def spread(
    items: Sequence[Item], participants: int, raters: int, rng: torch.Generator
) -> list[list[int]]:
    """Give each item to `raters` participants; return the items of each.

    Loads differ by one at most. Of participants with equal loads, those who have seen least of the
    item's person get it: a face that was shown before is easier to find again.
    """
    loads: list[list[int]] = [[] for _ in range(participants)]
    seen: list[Counter[int]] = [Counter() for _ in range(participants)]
    for number in torch.randperm(len(items), generator=rng).tolist():
        person = items[number].person
        chance = torch.rand(participants, generator=rng).tolist()
        order = sorted(
            range(participants), key=lambda who: (len(loads[who]), seen[who][person], chance[who])
        )
        for who in order[:raters]:
            loads[who].append(number)
            seen[who][person] += 1
    return loads


def trials_of(
    own: Sequence[int], checks: Sequence[int], items: Sequence[Item], rng: torch.Generator
) -> list[Trial]:
    """Put items and attention checks in a random order, and the options of each in another.

    One check comes early, so that few leave before it.
    """
    order = [own[place] for place in torch.randperm(len(own), generator=rng).tolist()]
    for number, check in enumerate(checks):
        last = min(EARLY - 1, len(order)) if number == 0 else len(order)
        order.insert(int(torch.randint(last + 1, (1,), generator=rng)), check)
    return [
        Trial(item=item, order=torch.randperm(items[item].none, generator=rng).tolist())
        for item in order
    ]
