"""DP-SGD: clipping, noise and sampling against slow references, accounting, and refusals."""

import math
import sys
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.types import Target
from frostglass.defenses import compose, training
from frostglass.defenses.base import TrainingSize
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.taps import find_head, find_taps
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import optimizer_tensors, restore_optimizer
from worlds import images, same_weights
from worlds import target as tiny_target

SIZE = TrainingSize(records=40, batch=8, epochs=3)


def network(dtype=torch.float64):
    """Convolution, group norm and linear layers without dropout."""
    with seeded(0, "tests", "dpsgd"):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.GroupNorm(4, 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 4, 3, 2, 1),
            nn.Flatten(),
            nn.Linear(64, 4),
        )
        for weight in net.parameters():
            weight.data += 0.1 * torch.randn(weight.shape)
    return net.to(dtype)


def samples(count=5, seed=0, side=16, dtype=torch.float64):
    some = images(count, 4, shape=(3, side, side), seed=seed)
    return some.floats().to(dtype), some.labels


def built(name, side=32, mean=None, **options):
    module = build(
        name,
        classes=4,
        image_shape=(3, side, side),
        mean=mean,
        std=mean and (0.5,) * 3,
        seed=0,
        **options,
    )
    return Target(
        module=module,
        classes=tuple("abcd"),
        image_shape=(3, side, side),
        head=find_head(module, (3, side, side)),
    )


def one_by_one(module, pixels, labels):
    """The gradient of each image, as a batch of its own."""
    found = []
    for i in range(len(labels)):
        copy = deepcopy(module)
        copy.zero_grad()
        F.cross_entropy(copy(pixels[i : i + 1]), labels[i : i + 1]).backward()
        found.append([weight.grad for weight in copy.parameters() if weight.requires_grad])
    return found


def clipped_sum(found, clip):
    total = [torch.zeros_like(part) for part in found[0]]
    for gradient in found:
        norm = math.sqrt(sum(part.square().sum().item() for part in gradient))
        for place, part in zip(total, gradient, strict=True):
            place += part * min(1.0, clip / (norm + 1e-6))
    return total


def private_step(defense, module, pixels, labels, rule=None, size=SIZE):
    """One step of the loop; returns the private optimiser."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = rule or defense.optimizer(module, torch.optim.SGD(trained, lr=1.0), size)
    module.train()
    optimizer.zero_grad(set_to_none=True)
    if len(labels):
        F.cross_entropy(module(pixels), labels).backward()
    optimizer.step()
    return optimizer


def gradients(module):
    return [weight.grad for weight in module.parameters()]


def close(ours, theirs, tolerance=1e-9):
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_clipped_gradient_is_the_one_taken_image_by_image():
    module, (pixels, labels) = network(), samples()
    found = one_by_one(module, pixels, labels)
    norms = sorted(
        math.sqrt(sum(part.square().sum().item() for part in gradient)) for gradient in found
    )
    clip = (norms[1] + norms[2]) / 2  # two of the five stay whole, three are cut
    private_step(Dpsgd(noise=0, clip=clip), module, pixels, labels)
    assert close(
        gradients(module), [part / SIZE.batch for part in clipped_sum(found, clip)]
    )  # by 8, not by the 5 that came


def test_noise_is_sigma_times_clip_from_the_global_generator():
    module, (pixels, labels) = network(), samples()
    expected = clipped_sum(one_by_one(module, pixels, labels), 0.5)
    with seeded(3, "noise"):
        noise = [
            torch.normal(0.0, 2.0 * 0.5, size=weight.shape, dtype=weight.dtype)
            for weight in module.parameters()
        ]
    with seeded(3, "noise"):
        private_step(Dpsgd(noise=2.0, clip=0.5), module, pixels, labels)
    assert close(
        gradients(module),
        [(part + drawn) / SIZE.batch for part, drawn in zip(expected, noise, strict=True)],
    )


def test_noise_has_the_spread_it_says():
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 200)).double()
    with seeded(0, "spread"):
        private_step(Dpsgd(noise=3.0, clip=0.5), module, *samples(0))
    drawn = torch.cat([part.flatten() for part in gradients(module)])
    assert drawn.std().item() == pytest.approx(3.0 * 0.5 / 8, rel=0.01)
    assert abs(drawn.mean().item()) < 0.01


def test_an_empty_batch_is_a_step_of_noise_alone():
    module = network()
    before = deepcopy(module)
    with seeded(3, "noise"):
        noise = [
            torch.normal(0.0, 1.0, size=weight.shape, dtype=weight.dtype)
            for weight in module.parameters()
        ]
    with seeded(3, "noise"):
        private_step(Dpsgd(noise=1.0, clip=1.0), module, *samples(0))
    moved = [old - new for old, new in zip(before.parameters(), module.parameters(), strict=True)]
    assert close(moved, [drawn / SIZE.batch for drawn in noise])


def test_more_images_expected_than_there_are():
    """q is 1 then, and the sum is divided by the images there are."""
    module, (pixels, labels) = network(), samples()
    expected = clipped_sum(one_by_one(module, pixels, labels), 1.0)
    private_step(
        Dpsgd(noise=0, clip=1.0),
        module,
        pixels,
        labels,
        size=TrainingSize(records=5, batch=64, epochs=1),
    )
    assert close(gradients(module), [part / 5 for part in expected])
    assert [
        len(batch) for batch in Dpsgd().batches(labels, 64, torch.Generator().manual_seed(0))
    ] == [5]


@pytest.mark.parametrize(
    ("name", "mean", "options"),
    [
        ("timm:resnet18", (0.5, 0.4, 0.3), {}),
        ("resnet", None, {"width": 4, "depth": 1}),
        ("cnn", None, {"width": 4}),
    ],
)
def test_networks_that_add_in_place_keep_their_names_and_give_true_gradients(name, mean, options):
    plain = built(name, mean=mean, **options)
    weights = {
        key: value.shape
        for key, value in plain.module.state_dict().items()
        if "running" not in key and "num_batches" not in key
    }
    defense = Dpsgd(noise=0, clip=0.1)
    ready = defense.prepare(plain, seed=0)
    assert ready.head == plain.head
    assert {key: value.shape for key, value in ready.module.state_dict().items()} == weights
    assert isinstance(ready.module, Preprocess) is (mean is not None)
    assert find_head(ready.module, ready.image_shape) == ready.head
    assert len(find_taps(ready.module, ready.image_shape)) == 3
    before = deepcopy(ready.module)
    assert defense.problems(ready, TrainingSize(1000, 8, 1)) == []
    assert same_weights(before, ready.module)
    pixels, labels = samples(2, side=32)
    module = ready.module.double()
    expected = clipped_sum(one_by_one(module, pixels, labels), 0.1)
    private_step(defense, module, pixels, labels)
    assert close(gradients(module), [part / SIZE.batch for part in expected])


def test_layers_opacus_has_no_formula_for():
    """PReLU, and a weight that belongs to no layer, go the way of torch.func."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5, 1.5, 2.0]).view(3, 1, 1))

        def forward(self, x):
            return x * self.scale

    module = nn.Sequential(
        Scaled(), nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 4)
    ).double()
    pixels, labels = samples(3)
    expected = clipped_sum(one_by_one(module, pixels, labels), 0.2)
    private_step(Dpsgd(noise=0, clip=0.2), module, pixels, labels)
    assert close(gradients(module), [part / SIZE.batch for part in expected])


class ChannelsLast(nn.Module):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


def test_channels_last_in_memory():
    """Opacus 1.6 by itself gives other numbers here."""
    module = network()
    module[3] = nn.Sequential(ChannelsLast(), module[3])
    pixels, labels = samples(3)
    expected = clipped_sum(one_by_one(module, pixels, labels), 0.2)
    private_step(Dpsgd(noise=0, clip=0.2), module, pixels, labels)
    assert close(gradients(module), [part / SIZE.batch for part in expected])


class NoisyHead(nn.Module):
    """A bottleneck that draws its code in the forward pass, as MID's does."""

    def __init__(self, features, classes):
        super().__init__()
        self.encode, self.decode = nn.Linear(features, 10), nn.Linear(5, classes)
        self.given = None

    def forward(self, features):
        mean, raw = self.encode(features).chunk(2, 1)
        noise = torch.randn_like(mean) if self.given is None else self.given
        return self.decode(mean + F.softplus(raw) * noise)


def test_noise_inside_the_forward_pass():
    """With the same draws, each image's gradient is that of the image alone."""
    module, (pixels, labels) = network(torch.float32), samples(2)
    module[-1] = NoisyHead(64, 4)
    defense = Dpsgd(noise=0, clip=0.3)
    assert (
        defense.problems(
            replace(tiny_target(), module=module, head="5.decode"), TrainingSize(1000, 8, 1)
        )
        == []
    )
    module.double()
    with seeded(1, "code"):
        draws = torch.randn(2, 5, dtype=torch.float64)
    found = []
    for row, draw in enumerate(draws):
        copy = deepcopy(module)
        copy[-1].given = draw[None]
        found += one_by_one(copy, pixels[row : row + 1], labels[row : row + 1])
    with seeded(1, "code"):
        private_step(defense, module, pixels, labels)
    assert close(gradients(module), [part / SIZE.batch for part in clipped_sum(found, 0.3)])


def test_frozen_weights_are_neither_noised_nor_counted_in_the_norm():
    module, (pixels, labels) = network(), samples()
    module[0].requires_grad_(False)
    module[1].requires_grad_(False).eval()
    before = deepcopy(module)
    assert (
        Dpsgd().problems(
            replace(tiny_target(), module=deepcopy(module).float(), head="5"),
            TrainingSize(1000, 8, 1),
        )
        == []
    )
    expected = clipped_sum(one_by_one(module, pixels, labels), 0.1)
    optimizer = Dpsgd(noise=0, clip=0.1).optimizer(
        module, torch.optim.SGD(module.parameters(), lr=1.0), SIZE
    )  # even if the optimiser is given them
    private_step(None, module, pixels, labels, optimizer)
    assert [weight.grad for weight in module[:2].parameters()] == [None] * 4
    assert same_weights(before[:2], module[:2])
    assert close(gradients(module)[4:], [part / SIZE.batch for part in expected])
    noised = Dpsgd(noise=1.0, clip=0.1)
    with seeded(0, "noise"):
        private_step(noised, module, pixels, labels)
    assert same_weights(before[:2], module[:2])
    assert not torch.equal(before[3].weight, module[3].weight)


def residue(module):
    """Attributes and hooks on a network besides its weights."""
    layers = [set(vars(layer)) - set(vars(nn.Module())) for layer in module.modules()]
    hooks = [
        len(layer._forward_hooks) + len(layer._backward_hooks) + len(layer._forward_pre_hooks)
        for layer in module.modules()
    ]
    return layers, hooks, [set(vars(weight)) for weight in module.parameters()]


def test_no_hook_remains_on_the_network_after_a_step():
    module, (pixels, labels) = network(), samples()
    clean = residue(module)
    optimizer = private_step(Dpsgd(), module, pixels, labels)
    assert residue(module) == clean
    optimizer.zero_grad()
    assert residue(module) != clean  # and the test can see it
    optimizer.step()
    assert residue(module) == clean
    with frozen(module), torch.no_grad():
        module(pixels)
    pixels.requires_grad_()
    with frozen(module):  # as an attack does
        module(pixels)[:, 0].sum().backward()
    assert pixels.grad.abs().sum() > 0
    module.train()
    module(pixels).sum().backward()
    assert residue(module) == clean


def test_evaluation_inside_a_step_leaves_the_gradients_alone():
    module, (pixels, labels) = network(), samples()
    other = deepcopy(module)
    private_step(Dpsgd(noise=0), other, pixels, labels)
    optimizer = Dpsgd(noise=0).optimizer(module, torch.optim.SGD(module.parameters(), lr=1.0), SIZE)
    optimizer.zero_grad()
    with frozen(module), torch.no_grad():
        module(pixels[:2])
    F.cross_entropy(module(pixels), labels).backward()
    optimizer.step()
    assert same_weights(module, other)


def test_steps_in_the_wrong_order_are_refused():
    module, (pixels, labels) = network(), samples()
    optimizer = private_step(Dpsgd(), module, pixels, labels)
    with pytest.raises(RunError, match="a step without zero_grad before it"):
        optimizer.step()
    loss = F.cross_entropy(module(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    with pytest.raises(RunError, match="call zero_grad before the forward pass"):
        optimizer.step()


def epochs(module, optimizer, first, last, fabric=None):
    """The loop as training has it: seeded epochs of Poisson batches, a new learning rate each."""
    pixels, labels = samples(40, dtype=torch.float32)
    sizes = []
    for epoch in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (epoch + 1)
        module.train()
        with seeded(0, "epoch", epoch):
            for index in Dpsgd().batches(labels, 3, torch.Generator().manual_seed(epoch)):
                optimizer.zero_grad(set_to_none=True)
                if len(index):
                    loss = F.cross_entropy(module(pixels[index]), labels[index])
                    fabric.backward(loss) if fabric else loss.backward()
                optimizer.step()
                sizes.append(len(index))
        with frozen(module), torch.no_grad():
            module(pixels)
    return sizes


def test_a_run_resumes_to_the_bit_with_and_without_fabric():
    from lightning_fabric import Fabric

    def begin(wrapped):
        module = network(torch.float32)
        optimizer = Dpsgd(noise=0.5).optimizer(
            module, torch.optim.AdamW(module.parameters(), lr=1e-2), TrainingSize(40, 3, 4)
        )
        if not wrapped:
            return module, module, optimizer, None
        fabric = Fabric(accelerator="cpu", devices=1)
        return module, *fabric.setup(module, optimizer), fabric

    whole, called, optimizer, fabric = begin(True)
    sizes = epochs(called, optimizer, 0, 4, fabric)
    assert 0 in sizes
    assert optimizer.optimizer.original_optimizer.param_groups[0]["lr"] == 0.01 / 4
    bare, called, optimizer, fabric = begin(False)
    epochs(called, optimizer, 0, 4, fabric)
    assert same_weights(whole, bare)
    half, called, optimizer, fabric = begin(True)
    epochs(called, optimizer, 0, 2, fabric)
    state, tensors = (
        half.state_dict(),
        {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()},
    )
    assert {name.split("/")[1] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    resumed, called, optimizer, fabric = begin(True)
    resumed.load_state_dict(state)
    restore_optimizer(optimizer, tensors)
    epochs(called, optimizer, 2, 4, fabric)
    assert same_weights(whole, resumed)
    assert residue(resumed) == residue(network())


def test_poisson_sampling():
    labels = torch.zeros(5000, dtype=torch.long)
    draw = [Dpsgd().batches(labels, 50, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert len(draw[0]) == 100
    assert all(torch.equal(a, b) for a, b in zip(draw[0], draw[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(draw[0], draw[2], strict=True))
    sizes = torch.tensor([len(batch) for batch in draw[0]]).double()
    assert sizes.mean().item() == pytest.approx(
        50, abs=4 * math.sqrt(49.5 / 100)
    )  # binomial: variance N q (1 - q) = 49.5
    assert 30 < sizes.var().item() < 75  # fixed-size batches have 0
    times = torch.bincount(torch.cat(draw[0]), minlength=5000).double()
    assert times.var().item() == pytest.approx(
        0.99, rel=0.1
    )  # a shuffled epoch has every image exactly once
    assert all(len(batch) == len(batch.unique()) for batch in draw[0])
    assert len(Dpsgd().batches(labels[:5], 2, torch.Generator())) == 2
    assert (
        sum(
            len(batch) == 0
            for batch in Dpsgd().batches(labels[:100], 1, torch.Generator().manual_seed(0))
        )
        > 20
    )  # (1 - q)^N = 37 %


def integer_bound(noise, rate, steps, delta):
    """The bound of integer Rényi orders α.

    Per step: ln Σ_k C(α, k) (1 - q)^(α - k) q^k exp(k (k - 1) / 2σ²) / (α - 1).
    """
    found = []
    for order in range(2, 256):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (order - k) * math.log1p(-rate) + k * math.log(rate) + k * (k - 1) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        renyi = np.logaddexp.reduce(terms) / (order - 1)
        found.append(
            steps * renyi
            + math.log1p(-1 / order)
            - (math.log(delta) + math.log(order)) / (order - 1)
        )
    return min(found)


def fractional_bound(noise, rate, steps, delta, orders):
    """The same with any order, the expectation integrated by hand."""
    x = np.linspace(-20 * noise, 20 * noise + 20, 200_001)
    density = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    found = []
    for order in orders:
        exponent = density + order * ratio
        renyi = (exponent.max() + math.log(np.trapezoid(np.exp(exponent - exponent.max()), x))) / (
            order - 1
        )
        found.append(
            steps * renyi
            + math.log1p(-1 / order)
            - (math.log(delta) + math.log(order)) / (order - 1)
        )
    return min(found)


@pytest.mark.parametrize(
    ("batch", "noise", "orientation"),
    [
        (64, 0.5, 16.5), (64, 0.7, 4.9), (64, 1.0, 2.0), (64, 1.5, 1.06), (64, 2.0, 0.73),
        (512, 0.5, 60), (512, 0.7, 16.5), (512, 1.0, 6.7), (512, 1.5, 3.4), (512, 2.0, 2.3),
    ],
)  # fmt: skip
def test_epsilon_beside_bounds_written_out_here(batch, noise, orientation):
    size = TrainingSize(27018, batch, 50)
    facts = Dpsgd(noise=noise).facts(tiny_target(), size)
    steps, rate = 50 * round(27018 / batch), batch / 27018
    assert facts["steps"] == steps
    assert facts["sample_rate"] == rate
    whole = integer_bound(noise, rate, steps, 1e-5)
    assert whole == pytest.approx(orientation, rel=0.02)
    assert facts["epsilon"] <= whole + 1e-6
    assert facts["epsilon"] == pytest.approx(
        fractional_bound(noise, rate, steps, 1e-5, [1 + k / 10 for k in range(1, 250)]), rel=0.005
    )
    if noise == 1.0:
        tight = Dpsgd(noise=noise, accountant="prv").facts(tiny_target(), size)
        assert tight["accountant"] == "prv"
        assert 0.85 * facts["epsilon"] < tight["epsilon"] < facts["epsilon"]


def test_facts():
    size = TrainingSize(records=1000, batch=60, epochs=10)
    facts = Dpsgd(noise=1.5, clip=0.7, delta=1e-4).facts(tiny_target(), size)
    assert {key: facts[key] for key in facts if key not in ("epsilon", "note")} == {
        "delta": 1e-4,
        "noise": 1.5,
        "clip": 0.7,
        "sample_rate": 0.06,
        "steps": 170,
        "accountant": "rdp",
    }
    assert "membership of one training image, not for inversion" in facts["note"]
    assert facts["epsilon"] > Dpsgd(noise=1.6, delta=1e-4).facts(tiny_target(), size)["epsilon"] > 0
    silent = Dpsgd(noise=0).facts(tiny_target(), size)
    assert silent["epsilon"] is None
    assert silent["note"] == "without noise there is no guarantee"
    weak = Dpsgd(noise=0.05, accountant="prv").facts(
        tiny_target(), size
    )  # prv would ask for terabytes here
    assert (weak["accountant"], weak["epsilon"] > 1000) == ("rdp", True)
    assert (
        Dpsgd(noise=1.0, accountant="prv").facts(tiny_target(), TrainingSize(50, 64, 1))[
            "accountant"
        ]
        == "rdp"
    )
    assert Dpsgd(**Dpsgd.disabled).facts(tiny_target(), size) == {}


def test_batch_norm_is_refused():
    target = tiny_target()
    message = (
        "dpsgd: BatchNorm layers (1) mix the samples of a batch, which voids the guarantee: "
        'use norm = "group"'
    )
    assert compose.problems([Dpsgd(norm="keep")], target, TrainingSize(1000, 8, 1)) == [message]
    many = compose.problems([Dpsgd(norm="keep")], built("timm:resnet18"), TrainingSize(1000, 8, 1))
    assert "(bn1, layer1.0.bn1, layer1.0.bn2, layer1.1.bn1, layer1.1.bn2 and 15 more)" in many[0]
    for both in (
        [Dpsgd(), Calor(rank=2, pre_norm=True)],
        [Calor(rank=2, pre_norm=True), Dpsgd()],
    ):  # heads come first in any order
        assert (
            compose.problems(
                both, compose.prepare(both, tiny_target(), seed=0), TrainingSize(1000, 8, 1)
            )
            == []
        )


def test_a_norm_with_one_value_a_group_is_refused():
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    (problem,) = Dpsgd().problems(
        Dpsgd().prepare(replace(tiny_target(), module=net, head="3"), seed=0),
        TrainingSize(1000, 8, 1),
    )
    assert problem == (
        "the norms 2 see one value at a time and would erase it: use another model or larger images"
    )
    small = Dpsgd(norm="instance").prepare(built("timm:resnet18"), seed=0)
    (problem,) = Dpsgd(noise=0, clip=None, norm="instance").problems(
        small, TrainingSize(1000, 8, 1)
    )  # also where only the norms are changed
    assert problem.startswith("the norms layer4.0.bn1, ")
    assert problem.endswith('use norm = "group"')


class MixesSamples(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class UsedFromOutside(nn.Module):
    """Calls no layer of its own, so no hook sees its weights."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(x, self.inner.weight, self.inner.bias)


class SplitsImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.reshape(-1, 4)).reshape(len(x), -1)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.copy_(x.detach().mean(0))
        return x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (MixesSamples(), "the logits of one image depend on the others in its batch"),
        (
            UsedFromOutside(),
            "missing or do not add up to the batch's gradient at 2.inner.weight, 2.inner.bias",
        ),
        (
            SplitsImages(),
            "missing or do not add up to the batch's gradient at 2.inner.weight, 2.inner.bias",
        ),
        (Remembers(), "2.mean store statistics of images without noise"),
        (nn.Sequential(nn.Unflatten(1, (8, 1)), nn.LSTM(1, 1)), "Opacus refuses a layer: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_networks_without_per_sample_gradients_are_refused(layer, message):
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), layer, nn.Linear(8, 4))
    state = deepcopy(net.state_dict())
    (problem,) = Dpsgd(norm="keep").problems(
        replace(tiny_target(), module=net, head="3"), TrainingSize(1000, 8, 1)
    )
    assert message in problem
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert all(weight.grad is None for weight in net.parameters())


def test_the_trial_does_not_disturb_the_global_generator():
    target = Dpsgd().prepare(tiny_target(), seed=0)  # it has dropout
    before = torch.get_rng_state()
    assert Dpsgd().problems(target, TrainingSize(1000, 8, 1)) == []
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("norm", "groups"), [("group", 8), ("instance", 24)])
def test_the_norm_swap_carries_weights_and_needs_no_seed(norm, groups):
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24, eps=1e-3), nn.Flatten(), nn.Linear(24 * 14 * 14, 4)
    )
    nn.init.normal_(net[1].weight)
    net[1].bias.requires_grad_(False)
    weight, bias = net[1].weight, net[1].bias
    other = deepcopy(net)
    made = Dpsgd(norm=norm).prepare(replace(tiny_target(), module=net, head="3"), seed=0).module
    assert (type(made[1]), made[1].num_groups, made[1].eps) == (nn.GroupNorm, groups, 1e-3)
    assert made[1].weight is weight
    assert made[1].bias is bias
    again = Dpsgd(norm=norm).prepare(replace(tiny_target(), module=other, head="3"), seed=1).module
    again.load_state_dict(made.state_dict())
    pixels = samples(dtype=torch.float32)[0]
    assert torch.equal(made(pixels), again(pixels))
    if norm == "instance":
        reference = F.instance_norm(made[0](pixels), weight=weight, bias=bias, eps=1e-3)
        assert torch.allclose(made[1](made[0](pixels)), reference, atol=1e-5)


def test_disabled_parameters_do_nothing():
    disabled, target = Dpsgd(**Dpsgd.disabled), tiny_target()
    before = deepcopy(target.module)
    assert disabled.prepare(target, seed=0) is target
    assert same_weights(before, target.module)
    assert disabled.problems(target, TrainingSize(1000, 8, 1)) == []
    rule = torch.optim.SGD(target.module.parameters(), lr=1.0)
    assert disabled.optimizer(target.module, rule, SIZE) is rule
    assert residue(target.module) == residue(before)
    assert disabled.replaces() == frozenset()
    assert not disabled.separates_samples()
    assert disabled.during_stage() is None


def test_before_a_stage_of_public_training_only_the_norms_change():
    assert Dpsgd().during_stage() == Dpsgd(noise=0, clip=None, norm="group")
    assert Dpsgd(norm="instance").during_stage() == Dpsgd(noise=0, clip=None, norm="instance")
    assert Dpsgd(norm="keep").during_stage() is None
    early = Dpsgd().during_stage()
    target = early.prepare(tiny_target(), seed=0)
    assert isinstance(target.module[1], nn.GroupNorm)
    rule = torch.optim.SGD(target.module.parameters(), lr=1.0)
    assert early.optimizer(target.module, rule, SIZE) is rule
    assert early.replaces() == frozenset()
    assert Dpsgd().replaces() == frozenset({"batches"})
    assert Dpsgd().separates_samples()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip": None}, "noise 1.0 is in units of clip"),
        ({"noise": -1}, "noise: expected at least 0"),
        ({"noise": math.inf}, "noise: expected a finite number"),
        ({"clip": 0}, "clip: expected more than 0"),
        ({"delta": 1}, "delta: expected less than 1"),
        ({"norm": "batch"}, "norm: expected 'group', 'instance' or 'keep'"),
        ({"accountant": "gdp"}, "accountant: expected 'rdp' or 'prv'"),
    ],
)
def test_parameters_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        Dpsgd(**values)


@pytest.fixture
def without_opacus(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"] or ["opacus"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"{training.__name__}._opacus", raising=False)
    monkeypatch.delattr(training, "_opacus", raising=False)


@pytest.mark.usefixtures("without_opacus")
def test_without_opacus():
    needs = pytest.raises(
        ConfigError,
        match=r"dpsgd needs Opacus \(.+\): install it with `pip install 'frostglass\[dp\]'`",
    )
    target = Dpsgd().prepare(
        tiny_target(), seed=0
    )  # a stored model can be built and attacked without it
    with needs:
        Dpsgd().problems(target, TrainingSize(1000, 8, 1))
    with needs:
        Dpsgd().optimizer(target.module, torch.optim.SGD(target.module.parameters(), lr=1.0), SIZE)
    with needs:
        Dpsgd().facts(target, SIZE)
    disabled = Dpsgd(**Dpsgd.disabled)
    assert disabled.problems(tiny_target(), TrainingSize(1000, 8, 1)) == []
    assert disabled.facts(target, SIZE) == {}
