"""The view of a device's features grants, refuses and counts; the ledger counts by part."""

import pytest
import torch
from torch import nn

from frostglass.attacks.features.base import QueryLedger
from frostglass.core.errors import AccessError, ConfigError, RunError
from frostglass.core.types import Halves
from frostglass.core.views import FeatureView, batch_invariant
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from worlds import MemoryWork

SHAPE, FEATURE = (3, 16, 16), (4, 8, 8)
IMAGES = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))


def halves() -> Halves:
    with seeded(0, "tests", "encoder"):
        encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
    return Halves(encoder.eval().requires_grad_(False), nn.Flatten(), SHAPE, FEATURE, "2")


def view(*access, **more) -> FeatureView:
    both = halves()
    return FeatureView(both, both.encoder(IMAGES[:2]), access, **more)


USES = {
    "encode": lambda view: view.encode(IMAGES),
    "encoder": lambda view: view.features(IMAGES),
    "protection": lambda view: view.protected(IMAGES),
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
def test_only_granted_access_works(granted, allowed):
    seen = view(*([granted] if granted else []))
    for access, use in USES.items():
        assert seen.grants(access) is (access in allowed)
        if access in allowed:
            assert use(seen).shape == (5, *FEATURE)
        else:
            names = granted or "the released features alone"
            with pytest.raises(AccessError, match=f"this view grants {names}, not {access}"):
                use(seen)
    assert seen.queries == 5 * len(allowed)


def test_further_releases_need_access_to_the_protection():
    with pytest.raises(AccessError, match="grants encode, encoder, not protection"):
        view("encode", "encoder").again(1)


def test_unknown_access_is_refused():
    with pytest.raises(
        ConfigError, match="access must name some of encode, encoder, protection; got gradients"
    ):
        view("gradients")


def test_features_of_another_layer_are_refused():
    with pytest.raises(ConfigError, match=r"\(4, 8, 8\), the encoder's, got \(4, 4, 4\)"):
        FeatureView(halves(), torch.zeros(2, 4, 4, 4), ["encode"])


def test_a_view_without_released_features_is_refused():
    with pytest.raises(ConfigError, match="no released features to attack"):
        FeatureView(halves(), torch.zeros(0, *FEATURE), ["encode"])


def test_features_that_are_not_finite_are_refused():
    broken = torch.full((2, *FEATURE), torch.nan)
    with pytest.raises(RunError, match="released features that are not finite: check its prot"):
        FeatureView(halves(), broken, ["encode"])
    seen = view("protection", protect=lambda images, number: broken, again=lambda number: broken)
    with pytest.raises(RunError, match="not finite"):
        seen.protected(IMAGES[:2])
    with pytest.raises(RunError, match="not finite"):
        seen.again(1)


def test_a_protection_that_loses_images_is_an_error():
    seen = view(
        "protection",
        protect=lambda images, number: torch.zeros(1, *FEATURE),
        again=lambda number: torch.zeros(2, 4),
    )
    with pytest.raises(RunError, match=r"\(1, 4, 8, 8\) for 5 images, expected \(5, 4, 8, 8\)"):
        seen.protected(IMAGES)
    with pytest.raises(RunError, match=r"\(2, 4\) for 2 images"):
        seen.again(3)


def test_only_the_encoder_passes_gradients():
    seen, images = view("encoder", "protection"), IMAGES.clone().requires_grad_()
    assert not seen.encode(images).requires_grad
    assert not seen.protected(images).requires_grad
    seen.features(images).sum().backward()
    assert images.grad.abs().sum() > 0


def test_a_device_without_protection_releases_plain_features():
    seen = view("protection")
    assert torch.equal(seen.protected(IMAGES), seen.encode_uncounted(IMAGES))
    assert torch.equal(seen.again(1), seen.released)


def test_the_protection_gets_converted_images_and_the_number():
    calls = []

    def protect(images, number):
        calls.append((images.shape, number))
        return torch.full((len(images), *FEATURE), float(number))

    seen = view("protection", protect=protect)
    assert (seen.protected(torch.rand(3, 1, 20, 20), 7) == 7).all()
    assert calls == [((3, *SHAPE), 7)]
    assert seen.queries == 3


def test_the_first_release_is_free_and_further_ones_are_counted():
    seen = view("protection", again=lambda number: torch.full((2, *FEATURE), float(number)))
    assert seen.again(0) is seen.released
    assert seen.queries == 0
    assert (seen.again(2) == 2).all()
    assert seen.queries == 2


def test_images_of_another_size_or_colour_are_converted():
    seen = view("encoder")
    grey = torch.rand(2, 1, 16, 16)
    assert torch.equal(seen.encode(grey), seen.encode(grey.expand(-1, 3, -1, -1)))
    assert seen.features(torch.rand(2, 3, 40, 30)).shape == (2, *FEATURE)


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (3, 16, 16)])
def test_tensors_that_are_not_images_are_refused(shape):
    with pytest.raises(ConfigError, match=r"expected images \(N, C, H, W\), at least one"):
        view("encode").encode(torch.zeros(shape))


def test_a_feature_does_not_depend_on_the_other_images():
    seen = view("encode")
    images = torch.rand(150, *SHAPE, generator=torch.Generator().manual_seed(1))
    together = seen.encode(images)
    atol = 1e-4 * together.abs().max().item()
    assert torch.allclose(seen.encode(images[77:78]), together[77:78], atol=atol)
    assert torch.allclose(seen.encode(images[60:101]), together[60:101], atol=atol)
    assert torch.allclose(seen.module(images), together, atol=atol)


def test_uncounted_features_are_not_counted():
    seen = view()
    assert torch.allclose(seen.encode_uncounted(IMAGES[:2]), seen.released, atol=1e-4)
    assert seen.queries == 0


def test_rows_pass_a_network_in_padded_chunks():
    sizes = []

    def network(rows):
        sizes.append(len(rows))
        return rows * 2

    rows = torch.arange(70.0)[:, None]
    assert torch.equal(batch_invariant(network, rows), rows * 2)
    assert sizes == [64, 16]  # six rows, padded


def test_the_encoder_can_be_frozen_through_the_view():
    seen = view("encoder")
    seen.module.train()
    before = seen.module[1].running_mean.clone()
    with frozen(seen.module):
        seen.features(IMAGES)
    assert torch.equal(seen.module[1].running_mean, before)
    assert seen.module.training


@pytest.fixture
def work():
    """Checkpoints of a ledger with two nested parts and one that was interrupted."""
    seen, work = view("encode"), MemoryWork()
    seen.encode(IMAGES)  # before the attack: not counted
    ledger = QueryLedger(work, seen)

    def outer():
        ledger.once("inner", lambda: seen.encode(IMAGES))
        return seen.encode(IMAGES[:1])

    ledger.once("outer", outer)
    with ledger.part("long"):
        seen.encode(IMAGES[:2])
        ledger.save("long", {}, {"note": 3})
    assert ledger.queries == 8
    return work


@pytest.mark.parametrize("names", [("inner", "outer", "long"), ("long", "inner"), ("long",)])
def test_checkpoints_count_every_query_once_in_any_order(work, names):
    assert work.kept["long"][1]["queries"] == {"": 0, "inner": 5, "outer": 1, "long": 2}
    ledger = QueryLedger(work, seen := view("encode"))
    assert all(ledger.load(name) for name in names)
    assert ledger.queries == 8
    assert seen.queries == 0


def test_a_resumed_part_adds_to_its_count(work):
    ledger = QueryLedger(work, seen := view("encode"))
    value = ledger.once("outer", lambda: pytest.fail("computed twice"))
    assert value.shape == (1, *FEATURE)
    assert ledger.queries == 6
    with ledger.part("long"):
        assert ledger.load("long")[1]["note"] == 3
        seen.encode(IMAGES[:3])
        ledger.save("long", {})
    assert ledger.queries == 11
    assert work.kept["long"][1]["queries"]["long"] == 5


def test_a_part_finished_inside_another_is_not_repeated(work):
    del work.kept["outer"], work.kept["long"]
    ledger = QueryLedger(work, view("encode"))
    ledger.once("outer", lambda: ledger.once("inner", lambda: pytest.fail("computed twice")))
    assert ledger.queries == 5
    assert ledger.load("unknown") is None
