"""A user's own generator: its latents and images, and every wrong statement explained."""

import math
import sys

import onnx
import pytest
import torch
from torch import nn

from frostglass.attacks._search.start import Pool
from frostglass.attacks.base import invert, prior_only
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.core.prior import UNKNOWN
from frostglass.priors._user_images import Latents, UserImages, check_generator
from frostglass.priors.base import priors
from frostglass.priors.generator import Generator, prior_from
from generators import NORMALS, PUBLIC, Dcgan, Z, code, generator, generator_folder, onnx_model
from worlds import SHAPE, rng, target


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    yield from generator_folder(tmp_path, monkeypatch)


def test_latents_are_carried_to_the_stated_distribution():
    assert torch.equal(Latents.parse("normal:3x2x1").of(NORMALS), NORMALS.view(5, 3, 2, 1))
    by_hand = torch.tensor([[math.erf(n / math.sqrt(2)) for n in row] for row in NORMALS.tolist()])
    assert torch.allclose(Latents.parse("uniform:6").of(NORMALS), by_hand, atol=1e-6)
    many = torch.randn(40_000, 1, generator=torch.Generator().manual_seed(0))
    shares = torch.histc(Latents.parse("uniform:1").of(many), 10, -1, 1) / 40_000
    assert (shares - 0.1).abs().max() < 0.006
    on_sphere = Latents.parse("sphere:6").of(NORMALS)
    assert torch.allclose(on_sphere.norm(dim=1), torch.full((5,), math.sqrt(6)), atol=1e-4)
    assert torch.allclose(
        on_sphere / on_sphere.norm(dim=1, keepdim=True),
        NORMALS / NORMALS.norm(dim=1, keepdim=True),
        atol=1e-6,
    )
    assert Latents.parse("sphere:6").of(torch.zeros(1, 6)).isfinite().all()


@pytest.mark.parametrize("kind", ["normal", "uniform", "sphere"])
def test_gradients_of_the_carrying(kind):
    assert torch.autograd.gradcheck(
        Latents.parse(f"{kind}:3x2").of, NORMALS[:2].double().requires_grad_()
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "normal",
        "normal:",
        "gauss:5",
        "normal:0",
        "normal:5x",
        "normal:-5",
        "normal:5×1",
        "normal:1.5",
    ],
)
def test_bad_latents(text):
    with pytest.raises(
        ConfigError,
        match=r"latent: expected a kind .normal, uniform, sphere. and a shape, such as normal:512",
    ):
        generator(latent=text)
    with pytest.raises(ConfigError, match="prior_from: latent: expected a kind"):
        prior_from(Dcgan(), latent=text)


def test_a_module_becomes_a_prior():
    net = Dcgan().eval()
    prior = prior_from(net, latent=f"normal:{Z}x1x1", range=(-1, 1), size=16)
    raw = net(NORMALS[..., None, None])
    assert torch.equal(prior.images(NORMALS), (raw / 2 + 0.5).clamp(0, 1))
    assert (
        prior.latent,
        prior.image_shape,
        prior.critic,
        len(prior.seen_identities),
        prior.condition,
    ) == (Z, SHAPE, None, 0, "")
    assert prior.info["seen_identities"] == UNKNOWN
    wider = prior_from(
        net, latent=f"normal:{Z}x1x1", range=(0.9, -0.9)
    )  # black and white the other way round
    assert torch.allclose(wider.generator.paint(NORMALS), (0.9 - raw) / 1.8, atol=1e-6)
    assert wider.generator.paint(NORMALS).min() < 0
    assert torch.equal(wider.images(NORMALS), wider.generator.paint(NORMALS).clamp(0, 1))


@pytest.mark.parametrize("source", ["onnx:gen.onnx", "torchscript:gen.pt", "own_generator:make"])
def test_every_source_gives_the_images_and_gradients_of_the_module(source, here):
    code(
        "import torch\nfrom torch import nn\nimport test_dcgan\n\ndef make():\n    return "
        "test_dcgan.Dcgan()\n"
    )
    sys.modules["test_dcgan"] = sys.modules["generators"]
    prior = generator(source).train(PUBLIC)
    del sys.modules["test_dcgan"]
    known = UserImages(Dcgan().eval(), Latents("normal", (Z, 1, 1)), -1, 1)
    one, other = NORMALS.clone().requires_grad_(), NORMALS.clone().requires_grad_()
    made, expected = prior.images(one), known(other)
    assert torch.allclose(made, expected, atol=1e-5)
    weight = torch.rand(expected.shape, generator=torch.Generator().manual_seed(3))
    slopes = [
        torch.autograd.grad((images * weight).sum(), start)[0]
        for images, start in ((made, one), (expected, other))
    ]
    assert slopes[1].norm() > 1
    assert torch.allclose(*slopes, atol=1e-3)
    assert not prior.generator.training


def test_it_is_registered_without_a_critic():
    assert priors.get("generator") is Generator
    method = generator()
    assert (method.tied, method.access, method.ready) == (False, None, True)
    assert method.untrained(SHAPE, 0).critic is None


class Changed(nn.Module):
    """A Dcgan whose images are changed."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = Dcgan(), change

    def forward(self, latents):
        return self.change(self.net(latents), latents)


def blinking(images, latents):
    return images + 0.05 * torch.randn_like(images)


def half_detached(images, latents):
    return (images + images.detach()) / 2


def centred(images, latents):
    return images - images.mean(0)


def one_row(images, latents):
    return images[:1]


WRONG = [
    (
        {"latent": "normal:6"},
        None,
        r"Dcgan cannot take 3 latents of 6, stated as normal:6: Expected .*; it takes "
        r"normal:6x1x1$",
    ),
    (
        {"latent": "normal:7x1x1"},
        None,
        r"cannot take 3 latents of 7×1×1, stated as normal:7x1x1: Given transposed=1, weight "
        r"of size \[6, ",
    ),
    (
        {"range": (0, 1)},
        None,
        r"52% of its values lie outside the stated range 0:1, they go from -.* to .*: it "
        r"looks like -1:1; state as",
    ),
    (
        {"range": (0, 255)},
        None,
        r"its values use 0% of the stated range 0:255, .*: it looks like -1:1; state as "
        r"prior.range",
    ),
    (
        {},
        lambda x, z: x / 2 + 0.5,
        r"its values use 50% of the stated range -1:1, they go from .*: it looks like 0:1; ",
    ),
    (
        {},
        lambda x, z: x * 127.5 + 127.5,
        r"\d\d% of its values lie outside the stated range -1:1, .*: it looks like 0:255; ",
    ),
    (
        {"range": (0, 1)},
        lambda x, z: x * 40,
        r"of its values lie outside the stated range 0:1, they go from -4\d?.* to \S+: state "
        r"as prior.range",
    ),
    (
        {"range": (3, 3)},
        None,
        "prior_from: range: expected two different numbers, for black and for white, got 3 and 3",
    ),
    (
        {"size": 64},
        None,
        "Dcgan makes images of 16×16 pixels, and 64×64 was stated: correct prior.size",
    ),
    (
        {},
        blinking,
        r"Changed draws noise: the same latents gave images that differ by up to \d+\.\d% of "
        r"the range; switch the noise off",
    ),
    (
        {},
        half_detached,
        "its gradients predict 5[01]% of the change that a small step in its latents makes in "
        "its images: a part of it is det",
    ),
    (
        {},
        lambda x, z: x.detach(),
        "Changed lets no gradient through from its images to its latents: a part of it is detached",
    ),
    ({}, lambda x, z: x.detach() + 0 * z.sum(), "its gradients predict 0% of the change"),
    (
        {},
        lambda x, z: (x * 2).round() / 2,
        "its gradients predict 0% of the change|its gradients predict no change, and none is what",
    ),
    (
        {},
        lambda x, z: (
            x[:1].detach().expand(len(z), -1, -1, -1) * 0 + x.new_tensor([-1.0, 1.0]).repeat(8)
        ),
        "makes the same image of every",
    ),
    (
        {},
        centred,
        r"Changed makes other images of the same latents in another batch, by up to .*: it "
        r"normalises over the batch",
    ),
    (
        {},
        one_row,
        "Changed gives 1 images for 3 latents of 6×1×1: export it with a batch axis of any length",
    ),
    (
        {},
        lambda x, z: (x, z),
        "Changed gives a tuple: return the images alone, from a small module around it if need be",
    ),
    (
        {},
        lambda x, z: x.flatten(1),
        r"gives float32 \(3, 768\) for 3 latents of 6×1×1: expected float images \(3, 1 or 3, "
        r"height, width\)$",
    ),
    (
        {},
        lambda x, z: x.permute(0, 2, 3, 1),
        r"gives float32 \(3, 16, 16, 3\) for .*; its channels come last: add .permute\(0, 3, "
        r"1, 2\)",
    ),
    ({}, lambda x, z: (x * 127 + 128).byte(), r"Changed gives uint8 \(3, 3, 16, 16\)"),
    ({}, lambda x, z: x[:, :2], r"Changed gives float32 \(3, 2, 16, 16\)"),
    (
        {},
        lambda x, z: x / 0,
        "Changed gives NaN or infinity for 3 latents of 6×1×1: its weights or the statement "
        "of its latents",
    ),
]


@pytest.mark.parametrize(("stated", "change", "message"), WRONG)
def test_a_wrong_statement_is_explained(stated, change, message):
    net = Changed(change) if change else Dcgan()
    with pytest.raises((ModelError, ConfigError), match=message) as error:
        prior_from(net, **{"latent": "normal:6x1x1", **stated})
    assert "\n" not in str(error.value)


def test_batch_norm_in_training_mode_is_put_right_and_values_beyond_the_range_are_borne():
    prior = prior_from(Dcgan().train(), latent="normal:6x1x1")
    assert not prior.generator.network.training
    raw = Dcgan().eval()(NORMALS[..., None, None])
    assert 0 < (raw.abs() > 0.95 * 1.05).float().mean() < 0.1
    check_generator(UserImages(Dcgan(), Latents("normal", (Z, 1, 1)), -0.95, 0.95), "wide")


def test_trying_leaves_no_trace():
    net = Changed(lambda x, z: x)
    net.train()
    images = UserImages(net, Latents("normal", (Z, 1, 1)), -1, 1)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert check_generator(images, "it") == SHAPE
    assert net.training
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_another_size_needs_consent():
    with pytest.raises(
        CheckpointError,
        match=(
            r"onnx:gen.onnx makes images of 16×16 pixels, the data has 32×32: set "
            r"prior.resize to true"
        ),
    ):
        generator().untrained((3, 32, 32), 0)
    prior = generator(resize=True).untrained((3, 32, 32), 0)
    assert (prior.image_shape, prior.info["resize"]) == (SHAPE, True)
    large = target(shape=(3, 32, 32))
    found = invert(
        Gmi(critic_weight=0, steps=2, candidates=2, keep=2),
        large.view(["gradients"]),
        Assets(prior=prior),
        people=[1],
    )
    assert found.images.shape == (1, 2, *SHAPE)
    with pytest.raises(
        ConfigError, match="the prior generates images of 3×16×16, the target takes 3×32×32"
    ):
        invert(
            Gmi(critic_weight=0),
            large.view(["gradients"]),
            Assets(prior=prior_from(Dcgan(), latent="normal:6x1x1")),
        )


@pytest.mark.parametrize(("made", "taken"), [(1, 3), (3, 1)])
def test_colour_and_grey_serve_each_other(made, taken):
    onnx.save(onnx_model(Dcgan(made)), "gen.onnx")
    prior, victim = generator().untrained((taken, 16, 16), 0), target(shape=(taken, 16, 16))
    assert prior.image_shape == (made, 16, 16)
    attack = Gmi(critic_weight=0, steps=30, candidates=2, keep=1, lr=0.1, coupling=1, clamp=0.0)
    found = invert(attack, victim.view(["gradients"]), Assets(prior=prior), seed=0)
    baseline = prior_only(prior, range(4), 1, seed=0)
    assert found.images.shape == (4, 1, made, 16, 16)
    with torch.no_grad():
        sure = [
            victim.module.eval()(victim.fit(p.images[:, 0])).softmax(1).diagonal().mean()
            for p in (found, baseline)
        ]
    assert sure[0] > sure[1] + 0.1


class Noting(Dcgan):
    """A generator that notes how many images it makes at once."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, latents):
        self.rows.append(len(latents))
        return super().forward(latents)


def test_images_are_made_in_parts_that_fit_into_the_memory():
    whole = UserImages(Dcgan().eval(), Latents("normal", (Z, 1, 1)), -1, 1)
    network = Noting().eval()
    network.load_state_dict(whole.network.state_dict())
    each = whole.image_bytes
    parts = UserImages(network, whole.latents, -1, 1, memory=5 * each / 2**30)
    assert parts.image_bytes == each > 4 * math.prod(whole(torch.zeros(1, Z)).shape)
    network.rows.clear()
    latents = [torch.randn(10, Z, generator=rng()).requires_grad_() for _ in range(2)]
    images = [make(normals) for make, normals in zip((whole, parts), latents, strict=True)]
    assert network.rows == [4, 4, 2]
    assert torch.allclose(*images, atol=1e-5)
    for made in images:
        made.square().sum().backward()
    assert torch.allclose(latents[0].grad, latents[1].grad, atol=1e-4)


def test_a_pool_shows_no_more_draws_at_once_than_a_search():
    network = Noting().eval()
    prior = prior_from(network, latent=f"normal:{Z}x1x1")
    view = target().view(["gradients"])
    network.rows.clear()
    Pool(view, prior, 70, seed=0, batch=20)
    assert network.rows == [32, 32, 6]
    network.rows.clear()
    Pool(view, prior, 300, seed=0, batch=1000)
    assert network.rows == [256, 44]
