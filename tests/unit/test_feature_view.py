"""The view of a device's features grants, refuses, counts, and takes nothing from a protection that has broken."""

import pytest
import torch
from torch import nn

from frostglass.attacks.features.base import Ledger
from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.types import Halves
from frostglass.core.views import FeatureView, batch_invariant
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import MemoryWork

SHAPE, FEATURE = (3, 16, 16), (4, 8, 8)
PICTURES = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))


def halves() -> Halves:
    with seeded(0, "tests", "encoder"):
        encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
    return Halves(encoder.eval().requires_grad_(False), nn.Flatten(), SHAPE, FEATURE, "2")


def view(*access, **more) -> FeatureView:
    both = halves()
    return FeatureView(both, both.encoder(PICTURES[:2]), access, **more)


USES = {
    "encode": lambda view: view.encode(PICTURES),
    "encoder": lambda view: view.features(PICTURES),
    "protection": lambda view: view.protected(PICTURES),
}


@pytest.mark.parametrize(
    ("granted", "allowed"),
    [
        ("encode", {"encode"}),
        ("encoder", {"encode", "encoder"}),
        ("protection", {"protection"}),
        (None, set()),
    ],
)
def test_what_is_granted_works_and_nothing_else(granted, allowed):
    seen = view(*([granted] if granted else []))
    for name, use in USES.items():
        if name in allowed:
            assert use(seen).shape == (5, *FEATURE)
        else:
            told = granted or "the released features alone"
            with pytest.raises(
                AccessError,
                match=f"this view grants {told} and not {name}: name it in the view's access",
            ):
                use(seen)
    assert seen.queries == 5 * len(allowed)


def test_victims_are_released_again_only_where_protection_is_granted():
    with pytest.raises(AccessError, match="grants encode, encoder and not protection"):
        view("encode", "encoder").again(1)


def test_unknown_access_is_refused():
    with pytest.raises(
        ConfigError, match="access must name some of encode, encoder, protection; got gradients"
    ):
        view("gradients")


def test_features_of_another_layer_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"the shape \(4, 4, 4\), and this encoder makes \(4, 8, 8\): cut the same model",
    ):
        FeatureView(halves(), torch.zeros(2, 4, 4, 4), ["encode"])


def test_nothing_released_is_refused():
    with pytest.raises(ConfigError, match="no feature was released"):
        FeatureView(halves(), torch.zeros(0, *FEATURE), ["encode"])


def test_what_is_not_finite_is_refused_wherever_it_comes_from():
    broken = torch.full((2, *FEATURE), torch.nan)
    with pytest.raises(
        RunError, match="released features that are not finite: look at its protection"
    ):
        FeatureView(halves(), broken, ["encode"])
    seen = view("protection", protect=lambda images, number: broken, again=lambda number: broken)
    with pytest.raises(RunError, match="not finite"):
        seen.protected(PICTURES[:2])
    with pytest.raises(RunError, match="not finite"):
        seen.again(1)


def test_a_protection_that_loses_pictures_is_told():
    seen = view(
        "protection",
        protect=lambda images, number: torch.zeros(1, *FEATURE),
        again=lambda number: torch.zeros(2, 4),
    )
    with pytest.raises(
        RunError, match=r"released \(1, 4, 8, 8\) for 5 pictures, expected \(5, 4, 8, 8\)"
    ):
        seen.protected(PICTURES)
    with pytest.raises(RunError, match=r"released \(2, 4\) for 2 pictures"):
        seen.again(3)


def test_plain_features_carry_no_gradient_and_the_encoder_does():
    seen, pictures = view("encoder", "protection"), PICTURES.clone().requires_grad_()
    assert not seen.encode(pictures).requires_grad
    assert not seen.protected(pictures).requires_grad
    seen.features(pictures).sum().backward()
    assert pictures.grad.abs().sum() > 0


def test_a_device_without_protection_releases_plain_features():
    seen = view("protection")
    assert torch.equal(seen.protected(PICTURES), seen.encode_uncounted(PICTURES))
    assert torch.equal(seen.again(1), seen.released)


def test_the_protection_gets_fitted_pictures_and_its_number():
    given = []

    def protect(images, number):
        given.append((images.shape, number))
        return torch.full((len(images), *FEATURE), float(number))

    seen = view("protection", protect=protect)
    assert (seen.protected(torch.rand(3, 1, 20, 20), 7) == 7).all()
    assert given == [((3, *SHAPE), 7)]
    assert seen.queries == 3


def test_victims_released_again_are_counted_apart_from_the_first_time():
    seen = view("protection", again=lambda number: torch.full((2, *FEATURE), float(number)))
    assert seen.again(0) is seen.released
    assert seen.queries == 0
    assert (seen.again(2) == 2).all()
    assert seen.queries == 2


def test_pictures_of_another_size_or_colour_are_fitted():
    seen = view("encoder")
    grey = torch.rand(2, 1, 16, 16)
    assert torch.equal(seen.encode(grey), seen.encode(grey.expand(-1, 3, -1, -1)))
    assert seen.features(torch.rand(2, 3, 40, 30)).shape == (2, *FEATURE)


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (3, 16, 16)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(ConfigError, match=r"expected pictures \(N, C, H, W\), at least one"):
        view("encode").encode(torch.zeros(shape))


def test_a_feature_is_the_same_in_any_company():
    seen = view("encode")
    pictures = torch.rand(150, *SHAPE, generator=torch.Generator().manual_seed(1))
    everything = seen.encode(pictures)
    assert torch.equal(seen.encode(pictures[77:78]), everything[77:78])
    assert torch.equal(seen.encode(pictures[60:101]), everything[60:101])
    assert torch.allclose(everything, seen.module(pictures), atol=1e-6)


def test_looking_up_for_the_record_is_not_counted():
    seen = view()
    assert torch.equal(seen.encode_uncounted(PICTURES[:2]), seen.released)
    assert seen.queries == 0


def test_rows_go_through_a_network_in_chunks():
    sizes = []

    def network(rows):
        sizes.append(len(rows))
        return rows * 2

    rows = torch.arange(70.0)[:, None]
    assert torch.equal(batch_invariant(network, rows), rows * 2)
    assert sizes == [64, 16]  # six rows, filled up to the batch_multiple


def test_the_encoder_is_frozen_through_the_view():
    seen = view("encoder")
    seen.module.train()
    before = seen.module[1].running_mean.clone()
    with frozen(seen.module):
        seen.features(PICTURES)
    assert torch.equal(seen.module[1].running_mean, before)
    assert seen.module.training


def test_a_checkpoint_knows_what_every_part_has_asked():
    seen, work = view("encode"), MemoryWork()
    seen.encode(PICTURES)  # before the attack: none of its business
    first = Ledger(work, seen)

    def outer():
        first.once("inner", lambda: seen.encode(PICTURES))
        return seen.encode(PICTURES[:1])

    made = first.once("outer", outer)
    with first.part("long"):
        seen.encode(PICTURES[:2])
        first.save("long", {}, {"note": 3})
    assert first.queries == 8
    assert work.kept["long"][1]["asked"] == {"": 0, "inner": 5, "outer": 1, "long": 2}
    # Read back in any order, together or alone, and with parts done again: each counts once.
    for names in (("inner", "outer", "long"), ("long", "inner"), ("long",)):
        second = Ledger(work, fresh := view("encode"))
        assert all(second.load(name) for name in names)
        assert second.queries == 8
        assert fresh.queries == 0
    again = Ledger(work, fresh := view("encode"))
    assert torch.equal(again.once("outer", lambda: pytest.fail("made twice")), made)
    assert again.queries == 6
    with again.part("long"):  # goes on where it was
        assert again.load("long")[1]["note"] == 3
        fresh.encode(PICTURES[:3])
        again.save("long", {})
    assert again.queries == 11
    assert work.kept["long"][1]["asked"]["long"] == 5
    del work.kept["outer"], work.kept["long"]
    third = Ledger(work, fresh := view("encode"))
    third.once("outer", lambda: third.once("inner", lambda: pytest.fail("made twice")))
    assert third.queries == 5
    assert third.load("never") is None
