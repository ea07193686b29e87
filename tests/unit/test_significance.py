"""The test behind "the attack breaks the undefended model": its errors, by simulation."""

from itertools import product

import pytest
import torch

from frostglass.metrics._significance import EXACT, LEVEL, paired_test, people_needed
from worlds import rng


def shares(recognised: int, people: int) -> torch.Tensor:
    return (torch.arange(people) < recognised).double()


def slow_reference(attack: torch.Tensor, baseline: torch.Tensor) -> float:
    differences = (attack - baseline).tolist()
    sums = [
        sum(sign * value for sign, value in zip(signs, differences, strict=True))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return sum(value >= sum(differences) - 1e-9 for value in sums) / len(sums)


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_test_equals_the_enumeration(seed):
    attack, baseline = torch.rand(2, 8, generator=rng(seed), dtype=torch.double)
    attack += 0.2
    assert paired_test(attack, baseline) == pytest.approx(slow_reference(attack, baseline))


def test_resampling_agrees_with_the_enumeration_next_to_the_limit():
    attack = torch.rand(EXACT + 1, generator=rng(3), dtype=torch.double) + 0.1
    baseline = torch.rand(EXACT + 1, generator=rng(4), dtype=torch.double)
    expected = slow_reference(attack, baseline)
    assert paired_test(attack, baseline) == pytest.approx(expected, abs=0.01)


def test_seven_of_sixteen_against_none_is_no_chance():
    assert paired_test(shares(7, 16), shares(0, 16)) == pytest.approx(0.5**7)
    assert paired_test(shares(6, 16), shares(0, 16)) > LEVEL
    assert paired_test(shares(0, 16), shares(0, 16)) == 1.0


@pytest.mark.parametrize(("people", "chance"), [(10, 0.05), (16, 0.3), (40, 0.02), (24, 0.1)])
def test_a_useless_attack_passes_at_most_as_often_as_the_level_says(people, chance):
    """2,000 audits whose attack is as good as the prior alone."""
    draws = (torch.rand(2, 2000, people, generator=rng(people)) < chance).double()
    alarms = sum(paired_test(a, b) < LEVEL for a, b in zip(*draws, strict=True))
    assert alarms <= 2000 * LEVEL + 3 * (2000 * LEVEL) ** 0.5


@pytest.mark.parametrize("share", [0.06, 0.2, 0.44, 0.8])
def test_so_many_people_show_the_share_in_four_of_five_audits(share):
    people = people_needed(share)
    draws = (torch.rand(500, people, generator=rng(1)) < share).double()
    found = sum(paired_test(draw, torch.zeros(people)) < LEVEL for draw in draws)
    assert found / 500 == pytest.approx(0.8, abs=0.12)


@pytest.mark.parametrize(("share", "baseline"), [(0.3, 0.05), (0.5, 0.2), (0.75, 0.1)])
def test_people_whom_the_baseline_recognises_make_more_people_necessary(share, baseline):
    people = people_needed(share * (1 - baseline), baseline * (1 - share))
    assert people > 1.2 * people_needed(share)
    attack, prior = torch.rand(2, 150, people, generator=rng(2)).double()
    pairs = zip((attack < share).double(), (prior < baseline).double(), strict=True)
    found = sum(paired_test(*pair) < LEVEL for pair in pairs)
    assert found / 150 == pytest.approx(0.8, abs=0.12)


def test_known_numbers_of_people():
    assert (people_needed(0.3), people_needed(0.75)) == (29, 11)
    assert people_needed(1e-4) == pytest.approx(90_750, rel=0.01)


def test_nobody_recognised_needs_no_number_of_people():
    assert people_needed(0.0) is None
    assert people_needed(1e-6) is None
    assert people_needed(0.2, 0.2) is None
    assert people_needed(0.1, 0.3) is None
