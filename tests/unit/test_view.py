"""Tests of views: they grant, refuse and count."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.core.assets import Assets
from frostglass.core.errors import AccessError, ConfigError, DataError
from frostglass.core.types import Images, Target
from frostglass.networks.dcgan import build_generator
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.layout import channels_last
from frostglass.runtime.seeding import generator_for, seed_for, seeded
from worlds import SHAPE, NoWork, prior, same_weights, target

IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
USES = {
    "labels": lambda view: view.labels(IMAGES),
    "scores": lambda view: view.scores(IMAGES),
    "gradients": lambda view: view.logits(IMAGES),
}


@pytest.mark.parametrize(
    ("granted", "allowed"),
    [("labels", {"labels"}), ("scores", {"labels", "scores"}), ("gradients", set(USES))],
)
def test_what_is_granted_works_and_nothing_else(granted, allowed):
    view = target().view([granted])
    for name, use in USES.items():
        if name in allowed:
            use(view)
        else:
            with pytest.raises(AccessError, match=f"grants {granted}, not {name}: ask for it"):
                use(view)
    assert view.queries == 3 * len(allowed)


def test_unknown_or_no_access_is_refused():
    with pytest.raises(
        ConfigError, match="access must name some of labels, scores, gradients; got weights"
    ):
        target().view(["weights"])
    with pytest.raises(ConfigError, match="got nothing"):
        target().view([])


def test_scores_carry_no_gradient_and_logits_do():
    images = IMAGES.clone().requires_grad_()
    view = target().view(["gradients"])
    assert not view.scores(images).requires_grad
    view.logits(images).sum().backward()
    assert images.grad.abs().sum() > 0


def test_images_of_another_size_or_colour_are_converted():
    view = target().view(["gradients"])
    with frozen(view.module):
        assert view.logits(torch.rand(2, 1, 24, 24)).shape == (2, 4)
        grey = torch.rand(2, 1, 16, 16)
        assert torch.equal(view.logits(grey), view.logits(grey.expand(-1, 3, -1, -1)))


def test_frozen_restores_everything_also_buffers_and_after_an_exception():
    module = target().module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def disturb():
        with frozen(module):
            assert not any(p.requires_grad for p in module.parameters())
            module[1].running_mean.add_(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        disturb()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_capture_removes_its_hooks():
    module = target().module
    with capture(module, ("0", "2")) as seen:
        module(IMAGES)
    assert set(seen) == {"0", "2"}
    assert not module[0]._forward_hooks


def test_seeds_are_derived_by_path():
    assert seed_for(0, "a", 1) == seed_for(0, "a", 1)
    assert (
        len(
            {
                seed_for(0, "a", 1),
                seed_for(1, "a", 1),
                seed_for(0, "a", 2),
                seed_for(0, "a/1"),
                seed_for(0, "b", 1),
            }
        )
        == 4
    )  # a path is its text
    assert generator_for(0, "x").initial_seed() == seed_for(0, "x")


def test_images_refuse_what_is_not_bytes():
    with pytest.raises(DataError, match="expected uint8 pixels of shape"):
        Images(pixels=torch.zeros(1, 3, 4, 4), labels=torch.zeros(1), names=("a",), sources=("a",))
    with pytest.raises(DataError, match="1 images, 2 labels and 1 sources"):
        Images(
            pixels=torch.zeros(1, 3, 4, 4, dtype=torch.uint8),
            labels=torch.zeros(2),
            names=("a",),
            sources=("a",),
        )


@pytest.mark.parametrize("samples", [0, -1, 1.5, None])
def test_samples_must_be_a_count(samples):
    with pytest.raises(ConfigError, match="samples must be a whole number of at least 1"):
        target().view("scores").averaged(samples)


# Straightened views


class Unhindered(torch.autograd.Function):
    """The slow reference: forwards a saturating function, backwards nothing."""

    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return Unhindered.apply(x, self.function)


class Numbered(nn.Module):
    """Adds noise that is numbered by `draw`, as MID's is."""

    draw = 0

    def forward(self, x):
        return x + torch.randn(x.shape, generator=generator_for(0, "tests", self.draw))


def saturated(squash, gate, *noise) -> Target:
    """A CALoR bottleneck behind a sigmoid, whose saturated tanh passes hardly any gradient."""
    with seeded(0, "tests", "saturated"):
        layers = [
            nn.Conv2d(3, 4, 3, 2, 1),
            gate,
            nn.Flatten(),
            nn.Linear(256, 5),
            squash,
            *noise,
            nn.Linear(5, 4),
        ]
    with torch.no_grad():
        layers[3].weight *= 60
    return Target(
        module=nn.Sequential(*layers),
        classes=tuple("abcd"),
        image_shape=SHAPE,
        head=str(len(layers) - 1),
        key="saturated",
    )


def slopes(view):
    """Logits and features of some images, and the gradient of a function of both."""
    images = IMAGES.clone().requires_grad_()
    logits, features = view.logits_and_features(images)
    (slope,) = torch.autograd.grad(
        (logits * torch.arange(1.0, 5)).sum() + features.square().sum(), images
    )
    return logits.detach(), features.detach(), slope


@pytest.mark.parametrize("samples", [1, 3])
def test_a_straightened_view_says_the_same_and_lets_gradients_pass(samples):
    noise = [Numbered()] if samples > 1 else []
    view = saturated(nn.Tanh(), nn.Sigmoid(), *noise).view(["gradients"]).averaged(samples)
    reference = (
        saturated(Apply(torch.tanh), nn.Sigmoid(), *noise).view(["gradients"]).averaged(samples)
    )
    plain, straight, slow = slopes(view), slopes(view.straightened()), slopes(reference)
    for ours, usual in zip(straight[:2], plain[:2], strict=True):
        assert torch.equal(ours, usual)
    assert torch.allclose(straight[2], slow[2], rtol=1e-4, atol=1e-4 * slow[2].abs().max())
    assert straight[2].norm() > 2 * plain[2].norm()
    assert view.queries == 2 * samples * len(IMAGES)  # both count in one place


def test_in_a_head_that_a_defense_put_in_sigmoids_are_straightened_too_and_elsewhere_nothing():
    def behind(squash, gate):
        made = saturated(nn.Identity(), gate)
        head = nn.Sequential(squash, made.module[-1])
        head.replaces_head = True
        made.module[-1] = head
        return replace(made, head=f"{made.head}.1").view(["gradients"])

    straight = slopes(behind(nn.Sigmoid(), nn.Tanh()).straightened())[2]
    slow = slopes(behind(Apply(torch.sigmoid), nn.Tanh()))[2]
    assert torch.allclose(straight, slow, rtol=1e-4, atol=1e-4 * slow.abs().max())


def test_averaging_and_straightening_go_in_either_order():
    view = saturated(nn.Tanh(), nn.Sigmoid(), Numbered()).view(["gradients"])
    one, other = slopes(view.averaged(2).straightened()), slopes(view.straightened().averaged(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert view.queries == 4 * len(IMAGES)


def test_a_straightened_view_leaves_no_hooks_also_after_an_exception():
    view = saturated(nn.Tanh(), nn.Sigmoid()).view(["gradients"])
    slopes(view.straightened())
    with pytest.raises(RuntimeError, match=r"expected scalar type|should be the same"):
        view.straightened().logits(IMAGES.double())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in view.module.modules())
    assert (
        slopes(view)[2].norm() < slopes(view.straightened())[2].norm() / 2
    )  # the view itself stays as it was


def test_nothing_changes_where_nothing_saturates():
    view = target().view(["gradients"])
    with frozen(view.module):
        assert all(
            torch.equal(a, b)
            for a, b in zip(slopes(view), slopes(view.straightened()), strict=True)
        )


def test_an_attack_looks_through_a_tanh():
    """Without a gradient, plain descent stays at its start, and straight-through does not."""
    made = saturated(nn.Tanh(), nn.Identity())
    with torch.no_grad():
        made.module[3].weight *= 100
        made.module[5].weight *= 8

    def found(**more):
        attack = Gmi(
            **(
                {
                    "steps": 40,
                    "lr": 0.1,
                    "coupling": 1,
                    "loss": "logit",
                    "critic_weight": 0.0,
                    "clamp": 0.0,
                }
                | more
            )
        )
        return invert(
            attack, made.view(["gradients"]), Assets(prior=prior()), seed=0, work=NoWork()
        )

    begun, plain, straight = found(steps=0), found(), found(straight_through=True)
    assert torch.equal(begun.latents, plain.latents)
    assert straight.confidence[:, 0].mean() > plain.confidence[:, 0].mean() + 0.2


# Layouts


def test_channels_last_gives_the_very_tensors_back():
    module = target().module
    module[0].weight.grad = torch.ones_like(module[0].weight)
    before = {
        name: (value.data_ptr(), value.stride(), value.clone())
        for name, value in module.state_dict().items()
    }
    parameters = [id(p) for p in module.parameters()]

    def inside(fail):
        with channels_last(module):
            assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
            assert not module[0].weight.is_contiguous()
            assert torch.equal(module[0].weight, before["0.weight"][2])
            if fail:
                raise KeyError("power cut")

    for fail in (False, True):
        if fail:
            with pytest.raises(KeyError, match="power cut"):
                inside(fail)
        else:
            inside(fail)
        after = module.state_dict()
        assert {name: (value.data_ptr(), value.stride()) for name, value in after.items()} == {
            n: b[:2] for n, b in before.items()
        }
        assert all(torch.equal(after[name], value) for name, (_, _, value) in before.items())
        assert [id(p) for p in module.parameters()] == parameters


class Reshaped(nn.Module):
    """A convolution whose maps are flattened in one of two ways; `view` requires a layout."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        with seeded(0, "tests", "reshaped"):
            self.conv, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(256, 4)

    def forward(self, x):
        maps = self.conv(x).relu()
        return self.head(maps.view(len(maps), -1) if self.way == "view" else maps.flatten(1))


def convolutional(students=()):
    """A prior whose images come out of convolutions."""
    with seeded(0, "tests", "convolutional"):
        generator = build_generator(6, 4, SHAPE).eval()
    return replace(prior(), generator=generator, students=students)


@pytest.mark.parametrize("known", [prior(), convolutional()], ids=["linear", "convolutional"])
def test_a_module_that_insists_on_a_layout_is_attackable(known):
    found = {}
    for way in ("view", "flatten"):
        made = Target(
            module=Reshaped(way), classes=tuple("abcd"), image_shape=SHAPE, head="head", key=way
        )
        weights = made.module.conv.weight.data_ptr()
        with (
            pytest.raises(RuntimeError, match="view size is not compatible")
            if way == "view"
            else frozen(),
            channels_last(made.module),
        ):
            made.module(IMAGES)
        found[way] = invert(
            Gmi(steps=8, lr=0.1, coupling=1),
            made.view(["gradients"]),
            Assets(prior=known),
            seed=0,
            work=NoWork(),
        )
        assert made.module.conv.weight.data_ptr() == weights
        assert same_weights(made.module, Reshaped(way))
    assert torch.allclose(found["view"].latents, found["flatten"].latents, atol=1e-3)
    assert torch.allclose(found["view"].images, found["flatten"].images, atol=1e-3)


def test_students_that_insist_on_a_layout_are_asked_all_the_same():
    made = target()
    found = [
        invert(
            Lomma(steps=3, regulariser="off"),
            made.view(["gradients"]),
            Assets(prior=convolutional((Reshaped(way),))),
            seed=0,
            work=NoWork(),
        )
        for way in ("view", "flatten")
    ]
    assert torch.allclose(found[0].latents, found[1].latents, atol=1e-3)


def test_another_error_of_a_module_is_not_taken_for_a_layout():
    made = Target(
        module=Reshaped("flatten"),
        classes=tuple("abcd"),
        image_shape=(3, 8, 8),
        head="head",
        key="wrong",
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        invert(
            Gmi(steps=1),
            made.view(["gradients"]),
            Assets(prior=replace(prior(), info={"resize": True})),
            seed=0,
            work=NoWork(),
        )
