"""Batch norms folded into the layers before them: the same numbers, everything back afterwards, and hands off where it would not be true."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from frostglass.attacks import base
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.types import Target
from frostglass.models.build import build
from frostglass.priors.wgan import build_generator
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import channels_last, frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import seeded
from worlds import NoWork, prior, target


def lively(module: nn.Module, seed: int = 0) -> nn.Module:
    """In double precision and evaluation, with statistics and affine weights that change what passes."""
    rng = torch.Generator().manual_seed(seed)
    module.double().eval()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (part.weight, -2, 2),
                (part.bias, -1, 1),
                (part.running_mean, -1, 1),
                (part.running_var, 0.2, 3),
            ):
                if tensor is not None:
                    tensor.data.copy_(torch.rand(tensor.shape, generator=rng) * (high - low) + low)
    return module


def made(layers) -> nn.Sequential:
    with seeded(0, "tests", "folding"):
        return lively(nn.Sequential(*layers()))


def shown(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def asked(module: nn.Module, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the gradient of something that weighs every output by another number."""
    leaf = data.clone().requires_grad_()
    out = module(leaf)
    (slope,) = torch.autograd.grad(
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum(), leaf
    )
    return out.detach(), slope


class Counted:
    """How often a function of torch is called."""

    def __init__(self, monkeypatch, name: str = "batch_norm"):
        self.calls, usual = 0, getattr(F, name)

        def counting(*args, **kwargs):
            self.calls += 1
            return usual(*args, **kwargs)

        monkeypatch.setattr(F, name, counting)


ROWS = {
    "conv": (lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()], (4, 3, 9, 9)),
    "conv without bias": (lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)], (4, 3, 9, 9)),
    "grouped and dilated": (lambda: [nn.Conv2d(4, 8, 3, 2, 2, 2, groups=2), nn.BatchNorm2d(8), nn.Tanh()], (4, 4, 11, 9)),
    "padded by reflection": (lambda: [nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8)], (4, 3, 9, 9)),
    "depthwise, padded to the same size": (lambda: [nn.Conv2d(4, 4, 3, padding="same", groups=4), nn.BatchNorm2d(4)], (4, 4, 9, 9)),
    "transposed": (lambda: [nn.ConvTranspose2d(6, 4, 5, 2, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()], (4, 6, 4, 4)),
    "transposed, grouped, dilated": (lambda: [nn.ConvTranspose2d(6, 9, 3, 2, 1, 1, 3, True, 2), nn.BatchNorm2d(9)], (4, 6, 4, 5)),
    "linear": (lambda: [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU()], (6, 7)),
    "linear without bias": (lambda: [nn.Linear(7, 5, bias=False), nn.BatchNorm1d(5)], (6, 7)),
    "two in a row": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)], (4, 3, 9, 9)),
    "rows in rows": (lambda: [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Sequential(nn.ReLU(), nn.Flatten())], (4, 3, 9, 9)),
}  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_gradients_stay_the_same(name, layout, monkeypatch):
    layers, shape = ROWS[name]
    module, data = made(layers), shown(*shape)
    if data.ndim == 4:
        data = data.contiguous(memory_format=layout)
    usual, slope = asked(module, data)
    norms = Counted(monkeypatch)
    with frozen(module), channels_last(*[module] * (layout == torch.channels_last)), folded(module):
        out, other = asked(module, data)
    assert norms.calls == (name == "two in a row")  # a batch norm after a batch norm stays
    assert torch.allclose(out, usual, rtol=1e-10, atol=1e-10)
    assert torch.allclose(other, slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["vgg16", "cnn", "resnet34", "mcnn", "generator"])
def test_whole_networks_stay_the_same(name, monkeypatch):
    if name == "generator":
        with seeded(0, "tests", "generator"):
            module, data, left = lively(build_generator(8, 4, (3, 32, 32))), shown(4, 8), 0
    else:
        wide, left = (
            ({}, 0)
            if name == "mcnn"
            else ({"width": 4}, {"vgg16": 1, "cnn": 0, "resnet34": 34}[name])
        )
        shape = (3, 32, 32)
        module, data = (
            lively(build(name, classes=5, image_shape=shape, seed=0, **wide)),
            shown(4, *shape),
        )
    usual, slope = asked(module, data)
    norms = Counted(monkeypatch)
    with frozen(module), channels_last(module), folded(module):
        out, other = asked(module, data)
    assert norms.calls == left  # in the blocks of a ResNet layers are not in a row
    assert torch.allclose(out, usual, rtol=1e-10, atol=1e-10 * float(usual.abs().max()))
    assert torch.allclose(other, slope, rtol=1e-10, atol=1e-10 * float(slope.abs().max()))


def test_layer_and_batch_norm_are_one_formula():
    """W' = s W, b' = s (b - mean) + shift, seen through the identity and zero."""
    module = made(lambda: [nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.1)])
    linear, norm = module
    with frozen(module), folded(module):
        bias = linear(torch.zeros(1, 3, dtype=torch.float64))[0]
        weight = (linear(torch.eye(3, dtype=torch.float64)) - bias).T
    s = norm.weight / (norm.running_var + 0.1).sqrt()
    assert torch.allclose(weight, s[:, None] * linear.weight, rtol=1e-12)
    assert torch.allclose(bias, s * (linear.bias - norm.running_mean) + norm.bias, rtol=1e-12)


def everything(module: nn.Module):
    """Objects, places in memory, layouts, flags and the order of all there is."""
    state = [
        (name, value.data_ptr(), value.stride(), value.clone())
        for name, value in module.state_dict().items()
    ]
    tensors = [
        (name, id(t), t.requires_grad, id(t.grad))
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    parts = [
        (name, id(part), part.training, sorted(vars(part))) for name, part in module.named_modules()
    ]
    return [entry[:3] for entry in state], tensors, parts, [entry[3] for entry in state]


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("order", ["folded inside", "folded outside the layout"])
def test_everything_is_back_afterwards(order, failing):
    module = made(
        lambda: [
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8, 4),
            nn.BatchNorm1d(4),
        ]
    )
    module.train()
    module[0].weight.grad = torch.ones_like(module[0].weight)
    module[1].bias.requires_grad_(False)
    before, data = everything(module), shown(2, 3, 3, 3)

    def inside():
        inner = (channels_last, folded) if order == "folded inside" else (folded, channels_last)
        with frozen(module), inner[0](module), inner[1](module):
            names = list(module.state_dict())
            assert all(
                torch.equal(a, b)
                for a, b in zip(module.state_dict().values(), before[3], strict=True)
            )
            asked(module, data)
            assert "forward" in vars(module[1])
            if failing:
                raise KeyError("power cut")
        assert names == [entry[0] for entry in before[0]]

    if failing:
        with pytest.raises(KeyError, match="power cut"):
            inside()
    else:
        inside()
    after = everything(module)
    assert after[:3] == before[:3]
    assert all(torch.equal(a, b) for a, b in zip(after[3], before[3], strict=True))


def test_blocks_in_blocks():
    """The inner block finds nothing left to fold, and its end leaves the outer one whole."""
    module, data = made(ROWS["conv"][0]), shown(4, 3, 9, 9)
    with frozen(module):
        with folded(module):
            once = module(data)
            with folded(module):
                assert torch.equal(module(data), once)
            assert torch.equal(module(data), once)
            assert "forward" in vars(module[0])
        assert "forward" not in vars(module[0])


# Where it would not be true, or cannot be known


class Doubling(nn.BatchNorm2d):
    def forward(self, maps):
        return 2 * super().forward(maps)


class Backwards(nn.Sequential):
    """A row that runs from its end to its beginning."""

    def forward(self, maps):
        for layer in reversed(self):
            maps = layer(maps)
        return maps


def changed(change, layers=lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)]):
    def build_it():
        module = made(layers)
        change(module)
        return module

    return build_it


def twice() -> nn.Module:
    layer = nn.Conv2d(3, 3, 3, padding=1)
    return lively(nn.Sequential(layer, nn.BatchNorm2d(3), nn.ReLU(), layer))


def norm_twice() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    return lively(nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.ReLU(), nn.Sequential(norm)))


def row_twice() -> nn.Module:
    row = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
    return lively(nn.Sequential(row, nn.ReLU(), row))


def blown_up(module):
    module[0].weight.data *= 1e200
    module[1].weight.data *= 1e200


SKIPPED = {
    "no affine": lambda: made(lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)]),
    "no statistics": lambda: made(lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)]),
    "statistics not tracked": changed(lambda m: setattr(m[1], "track_running_stats", False)),
    "a subclass": lambda: made(lambda: [nn.Conv2d(3, 8, 3), Doubling(8)]),
    "something between": lambda: made(lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)]),
    "a row that runs otherwise": lambda: lively(Backwards(nn.BatchNorm2d(3), nn.Conv2d(8, 3, 3), nn.BatchNorm2d(8), nn.Conv2d(3, 8, 3))),
    "a layer used twice": twice,
    "a batch norm used twice": norm_twice,
    "a row used twice": row_twice,
    "parametrised": changed(lambda m: parametrizations.spectral_norm(m[0])),
    "weight norm": changed(lambda m: weight_norm(m[0])),
    "pruned": changed(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)),
    "a function of its own": changed(lambda m: setattr(m[1], "forward", lambda maps: 3 * nn.BatchNorm2d.forward(m[1], maps))),
    "weights that overflow": changed(blown_up),
    "a hook before": changed(lambda m: m[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))),
    "a hook between": changed(lambda m: m[0].register_forward_hook(lambda _, args, out: out + 1)),
    "a hook backwards": changed(lambda m: m[1].register_full_backward_hook(lambda _, gives, takes: (gives[0] * 2,))),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", SKIPPED)
def test_what_may_be_more_than_it_seems_is_left_alone(name, monkeypatch):
    with seeded(0, "tests", "skipped"):
        module = SKIPPED[name]()
    data = shown(4, 3, 9, 9)
    norms = Counted(monkeypatch)
    with frozen(module):
        usual, slope = asked(module, data)
        called = norms.calls
        with folded(module):
            out, other = asked(module, data)
    assert norms.calls == 2 * called > 0
    assert torch.equal(out, usual) or name == "weights that overflow"
    assert torch.equal(other, slope) or name == "weights that overflow"
    assert torch.equal(out.nan_to_num(), usual.nan_to_num())


@pytest.mark.parametrize("why", ["training", "weights that learn", "a batch norm that learns"])
def test_what_is_not_frozen_is_left_alone(why):
    module, data = made(ROWS["conv"][0]), shown(4, 3, 9, 9)
    module.requires_grad_(why == "weights that learn")
    if why == "training":
        module[1].train()
    if why == "a batch norm that learns":
        module[1].bias.requires_grad_()
    usual = copy.deepcopy(module)(data)
    with folded(module):
        assert not {"forward"} & {*vars(module[0]), *vars(module[1])}
        assert torch.equal(module(data), usual)


def test_another_precision_is_left_alone():
    module = made(ROWS["conv"][0])
    module[1].float()
    with frozen(module), folded(module):
        assert "forward" not in vars(module[0])


def test_a_batch_norm_over_other_axes_is_left_alone():
    """After a linear layer on sequences, BatchNorm1d normalises the places and not what the layer puts out."""
    module, data = made(ROWS["linear"][0]), shown(6, 5, 7)
    with frozen(module):
        usual = module(data)
        with folded(module):
            assert torch.equal(module(data), usual)


def test_a_layer_shared_by_two_networks_is_left_alone():
    layer = nn.Conv2d(3, 8, 3)
    one, other = (
        lively(nn.Sequential(layer, nn.BatchNorm2d(8))),
        lively(nn.Sequential(layer, nn.ReLU())),
    )
    with frozen(one, other), folded(one, other):
        assert "forward" not in vars(layer)


def test_who_watches_inside_the_block_sees_what_is_there():
    """A hook that comes and goes inside the block is given the real numbers, and the outputs stay the same."""
    module, data = (
        made(lambda: [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)]),
        shown(6, 7),
    )
    with frozen(module):
        names = ("0", "1", "3")
        with capture(module, names) as outputs, capture(module, names, inputs=True) as inputs:
            usual = module(data)
        with folded(module):
            for watched, before in ((False, outputs), (True, inputs)):
                for name in names:
                    with capture(module, (name,), inputs=watched) as seen:
                        assert torch.allclose(module(data), usual, rtol=1e-10)
                    assert torch.allclose(seen[name], before[name], rtol=1e-10)


# In attacks


def found(made_target, known, **more):
    return invert(
        Gmi(**({"steps": 6, "lr": 0.1, "coupling": 1} | more)),
        made_target.view(["gradients"]),
        known,
        seed=0,
        work=NoWork(),
    )


def test_attacks_fold_and_end_where_they_did(monkeypatch):
    made_target, known = target(), prior()
    rng = torch.Generator().manual_seed(3)
    for norm in (made_target.module[1], known.generator[1]):
        norm.running_mean.copy_(torch.rand(norm.num_features, generator=rng) / 4)
        norm.running_var.copy_(torch.rand(norm.num_features, generator=rng) + 0.5)
    norms = Counted(monkeypatch)
    quick = found(made_target, known)
    assert norms.calls == 4  # the two trials without folding, on two networks; none in the search
    monkeypatch.setattr(base, "_true_when_folded", lambda view, prior: [])
    slow = found(made_target, known)
    assert norms.calls == 4 + 2 + 2 * 7  # a trial of layouts, six steps and the reading
    assert torch.allclose(quick.latents, slow.latents, atol=1e-4)
    assert torch.allclose(quick.confidence, slow.confidence, atol=1e-4)
    assert quick.queries == slow.queries


class Picking(nn.Module):
    """Reads the convolution in the middle of a row: the batch norm after it is beside the point."""

    def __init__(self, inner: nn.Sequential):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        maps = self.inner[0](images)
        return self.inner[2:](maps) + 0 * self.inner[1](maps).mean()


def test_a_network_that_picks_layers_out_of_a_row_is_attacked_unfolded(monkeypatch):
    made_target = target()
    made_target.module[1].running_var.fill_(9.0)
    picking = replace(made_target, module=Picking(made_target.module), head="inner.6")
    folds = []
    monkeypatch.setattr(
        base, "folded", lambda *networks: folds.append(networks) or folded(*networks)
    )
    picked = found(picking, prior())
    assert [len(networks) for networks in folds] == [4, 0]
    monkeypatch.setattr(base, "_true_when_folded", lambda view, prior: [])
    assert torch.equal(picked.latents, found(picking, prior()).latents)


@pytest.mark.parametrize(
    ("batch", "candidates", "identities", "searches"),
    [(64, 5, 16, [48, 32]), (64, 2, 32, [64]), (64, 1, 64, [64]), (2, 3, 1, [3])],
)
def test_shards_are_of_a_size_that_fills_lanes(
    batch, candidates, identities, searches, monkeypatch
):
    attack = Gmi(steps=1, batch=batch, candidates=candidates, keep=1)
    assert base._identities(attack, candidates) == identities
    sizes, known = [], prior()
    module = nn.Sequential(nn.Flatten(), nn.Linear(768, 80))
    wide = Target(
        module=module,
        classes=tuple(map(str, range(80))),
        image_shape=(3, 16, 16),
        head="1",
        key="wide",
    )
    usual = base._read_out
    monkeypatch.setattr(
        base,
        "_read_out",
        lambda view, show, latents, *more: (
            sizes.append(len(latents)) or usual(view, show, latents, *more)
        ),
    )
    invert(attack, wide.view(["gradients"]), known, labels=range(identities), seed=0, work=NoWork())
    assert sizes == searches


def test_a_network_that_is_replicated_is_left_alone():
    network = (
        nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        .eval()
        .requires_grad_(False)
    )
    with folded(network):
        assert "forward" not in vars(network.module[0])
