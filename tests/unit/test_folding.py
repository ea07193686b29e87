"""Batch norms folded into the layers before them: same outputs, and everything restored."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from counting import Counted
from frostglass.models.build import build
from frostglass.networks.dcgan import build_generator
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.hooks import capture
from frostglass.runtime.layout import channels_last
from frostglass.runtime.seeding import seeded


def lively(module: nn.Module, seed: int = 0) -> nn.Module:
    """In double precision and evaluation mode, with batch norms that change their input."""
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


def build_row(layers) -> nn.Sequential:
    with seeded(0, "tests", "folding"):
        return lively(nn.Sequential(*layers()))


def inputs_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def output_and_slope(module: nn.Module, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of a weighted sum of it."""
    leaf = data.clone().requires_grad_()
    out = module(leaf)
    (slope,) = torch.autograd.grad(
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum(), leaf
    )
    return out.detach(), slope


ROWS = {
    "conv": (lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()], (4, 3, 9, 9)),
    "conv without bias": (
        lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)],
        (4, 3, 9, 9),
    ),
    "grouped and dilated": (
        lambda: [nn.Conv2d(4, 8, 3, 2, 2, 2, groups=2), nn.BatchNorm2d(8), nn.Tanh()],
        (4, 4, 11, 9),
    ),
    "padded by reflection": (
        lambda: [nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8)],
        (4, 3, 9, 9),
    ),
    "depthwise, same size": (
        lambda: [nn.Conv2d(4, 4, 3, padding="same", groups=4), nn.BatchNorm2d(4)],
        (4, 4, 9, 9),
    ),
    "transposed": (
        lambda: [nn.ConvTranspose2d(6, 4, 5, 2, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()],
        (4, 6, 4, 4),
    ),
    "transposed, grouped, dilated": (
        lambda: [nn.ConvTranspose2d(6, 9, 3, 2, 1, 1, 3, True, 2), nn.BatchNorm2d(9)],
        (4, 6, 4, 5),
    ),
    "linear": (lambda: [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU()], (6, 7)),
    "linear without bias": (lambda: [nn.Linear(7, 5, bias=False), nn.BatchNorm1d(5)], (6, 7)),
    "two in a row": (
        lambda: [
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)),
        ],
        (4, 3, 9, 9),
    ),
    "rows in rows": (
        lambda: [
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
            nn.Sequential(nn.ReLU(), nn.Flatten()),
        ],
        (4, 3, 9, 9),
    ),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_gradients_stay_the_same(name, layout, monkeypatch):
    layers, shape = ROWS[name]
    module, data = build_row(layers), inputs_of(*shape)
    if data.ndim == 4:
        data = data.contiguous(memory_format=layout)
    usual, slope = output_and_slope(module, data)
    norms = Counted(monkeypatch)
    with frozen(module), channels_last(*[module] * (layout == torch.channels_last)), folded(module):
        out, other = output_and_slope(module, data)
    assert norms.calls == (name == "two in a row")  # a batch norm after a batch norm stays
    assert torch.allclose(out, usual, rtol=1e-10, atol=1e-10)
    assert torch.allclose(other, slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["vgg16", "cnn", "resnet34", "mcnn", "generator"])
def test_whole_networks_stay_the_same(name, monkeypatch):
    if name == "generator":
        with seeded(0, "tests", "generator"):
            module, data, left = lively(build_generator(8, 4, (3, 32, 32))), inputs_of(4, 8), 0
    else:
        wide, left = (
            ({}, 0)
            if name == "mcnn"
            else ({"width": 4}, {"vgg16": 1, "cnn": 0, "resnet34": 36}[name])
        )
        shape = (3, 32, 32)
        module, data = (
            lively(build(name, classes=5, image_shape=shape, seed=0, **wide)),
            inputs_of(4, *shape),
        )
    usual, slope = output_and_slope(module, data)
    norms = Counted(monkeypatch)
    with frozen(module), channels_last(module), folded(module):
        out, other = output_and_slope(module, data)
    # The layers in blocks of a ResNet are not in a Sequential, and two narrow shortcuts are kept
    # from channels last by a hook.
    assert norms.calls == left
    assert torch.allclose(out, usual, rtol=1e-10, atol=1e-10 * float(usual.abs().max()))
    assert torch.allclose(other, slope, rtol=1e-10, atol=1e-10 * float(slope.abs().max()))


def test_the_formula_of_the_folded_layer():
    """W' = s W, b' = s (b - mean) + shift, seen through the identity and zero."""
    module = build_row(lambda: [nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.1)])
    linear, norm = module
    with frozen(module), folded(module):
        bias = linear(torch.zeros(1, 3, dtype=torch.float64))[0]
        weight = (linear(torch.eye(3, dtype=torch.float64)) - bias).T
    s = norm.weight / (norm.running_var + 0.1).sqrt()
    assert torch.allclose(weight, s[:, None] * linear.weight, rtol=1e-12)
    assert torch.allclose(bias, s * (linear.bias - norm.running_mean) + norm.bias, rtol=1e-12)


def everything(module: nn.Module):
    """Identity, memory, layout, flags and order of all modules and tensors."""
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
def test_everything_is_restored_afterwards(order, failing):
    module = build_row(
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
    before, data = everything(module), inputs_of(2, 3, 3, 3)

    def inside():
        inner = (channels_last, folded) if order == "folded inside" else (folded, channels_last)
        with frozen(module), inner[0](module), inner[1](module):
            names = list(module.state_dict())
            assert all(
                torch.equal(a, b)
                for a, b in zip(module.state_dict().values(), before[3], strict=True)
            )
            output_and_slope(module, data)
            assert "forward" in vars(module[1])
            if failing:
                raise KeyError("failed")
        assert names == [entry[0] for entry in before[0]]

    if failing:
        with pytest.raises(KeyError, match="failed"):
            inside()
    else:
        inside()
    after = everything(module)
    assert after[:3] == before[:3]
    assert all(torch.equal(a, b) for a, b in zip(after[3], before[3], strict=True))


def test_nested_blocks():
    """The inner block finds nothing to fold, and its end does not affect the outer one."""
    module, data = build_row(ROWS["conv"][0]), inputs_of(4, 3, 9, 9)
    with frozen(module):
        with folded(module):
            once = module(data)
            with folded(module):
                assert torch.equal(module(data), once)
            assert torch.equal(module(data), once)
            assert "forward" in vars(module[0])
        assert "forward" not in vars(module[0])


# Where folding would be wrong, or cannot be checked


class Doubling(nn.BatchNorm2d):
    def forward(self, maps):
        return 2 * super().forward(maps)


class Backwards(nn.Sequential):
    """A Sequential that runs its layers in reverse."""

    def forward(self, maps):
        for layer in reversed(self):
            maps = layer(maps)
        return maps


def changed(change, layers=lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)]):
    def build_it():
        module = build_row(layers)
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
    "no affine": lambda: build_row(lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)]),
    "no statistics": lambda: build_row(
        lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)]
    ),
    "statistics not tracked": changed(lambda m: setattr(m[1], "track_running_stats", False)),
    "a subclass": lambda: build_row(lambda: [nn.Conv2d(3, 8, 3), Doubling(8)]),
    "something between": lambda: build_row(
        lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)]
    ),
    "a row in another order": lambda: lively(
        Backwards(nn.BatchNorm2d(3), nn.Conv2d(8, 3, 3), nn.BatchNorm2d(8), nn.Conv2d(3, 8, 3))
    ),
    "a layer used twice": twice,
    "a batch norm used twice": norm_twice,
    "a row used twice": row_twice,
    "parametrised": changed(lambda m: parametrizations.spectral_norm(m[0])),
    "weight norm": changed(lambda m: weight_norm(m[0])),
    "pruned": changed(lambda m: prune.l1_unstructured(m[0], "weight", 0.5)),
    "a forward of its own": changed(
        lambda m: setattr(m[1], "forward", lambda maps: 3 * nn.BatchNorm2d.forward(m[1], maps))
    ),
    "weights that overflow": changed(blown_up),
    "a hook before": changed(
        lambda m: m[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    ),
    "a hook between": changed(lambda m: m[0].register_forward_hook(lambda _, args, out: out + 1)),
    "a backward hook": changed(
        lambda m: m[1].register_full_backward_hook(lambda _, grads, outputs: (grads[0] * 2,))
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", SKIPPED)
def test_layers_that_may_do_more_are_left_alone(name, monkeypatch):
    with seeded(0, "tests", "skipped"):
        module = SKIPPED[name]()
    data = inputs_of(4, 3, 9, 9)
    norms = Counted(monkeypatch)
    with frozen(module):
        usual, slope = output_and_slope(module, data)
        called = norms.calls
        with folded(module):
            out, other = output_and_slope(module, data)
    assert norms.calls == 2 * called > 0
    assert torch.equal(out, usual) or name == "weights that overflow"
    assert torch.equal(other, slope) or name == "weights that overflow"
    assert torch.equal(out.nan_to_num(), usual.nan_to_num())


@pytest.mark.parametrize("why", ["training", "weights that learn", "a batch norm that learns"])
def test_layers_that_are_not_frozen_are_left_alone(why):
    module, data = build_row(ROWS["conv"][0]), inputs_of(4, 3, 9, 9)
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
    module = build_row(ROWS["conv"][0])
    module[1].float()
    with frozen(module), folded(module):
        assert "forward" not in vars(module[0])


def test_a_batch_norm_over_other_axes_is_left_alone():
    """On sequences, BatchNorm1d normalises the positions and not the outputs of the layer."""
    module, data = build_row(ROWS["linear"][0]), inputs_of(6, 5, 7)
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


def test_hooks_inside_the_block_get_the_values_of_the_layers():
    """A hook registered inside the block gets the unfolded values; outputs stay the same."""
    module, data = (
        build_row(lambda: [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)]),
        inputs_of(6, 7),
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


def test_a_replicated_network_is_left_alone():
    network = (
        nn.DataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        .eval()
        .requires_grad_(False)
    )
    with folded(network):
        assert "forward" not in vars(network.module[0])
