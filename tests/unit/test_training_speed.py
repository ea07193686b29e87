"""Faster training: background batches, memory layout, few reads, precision and compilation."""

import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.data._augment import draw_changes
from frostglass.defenses.base import TrainingProgress
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.networks.decoder import Residual
from frostglass.runtime.layout import (
    channels_last,
    fastest_layout,
    gradients_laid_out,
    lay_out,
    narrow_projections,
)
from frostglass.training import accelerator, batches
from frostglass.training.accelerator import FabricAccelerator, supported_precision
from frostglass.training.batches import AHEAD, computed_ahead, prepared
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from frostglass.training.trainer import Trainer
from worlds import NoWork, rng, same_weights, split

SMALL = Training(model="cnn", options={"width": 4}, epochs=2, batch=16, lr=5e-3)
CPU = torch.device("cpu")
STRONG = {"flip": True, "shift": 2, "crop": 0.5, "jitter": (0.2, 0.2, 0.2, 0.1), "cutout": 0.4}


def train(config=SMALL, defenses=()):
    return train_target(config, split(), defenses, seed=0, work=NoWork(), device=CPU)


def test_tasks_are_computed_in_order_and_not_far_ahead():
    began = []

    def task(number):
        began.append(number)
        return number, threading.current_thread() is threading.main_thread()

    results = computed_ahead(lambda n=n: task(n) for n in range(6))
    assert next(results) == (0, False)
    assert len(began) <= AHEAD + 1
    assert [number for number, _ in results] == [1, 2, 3, 4, 5]
    assert began == list(range(6))
    assert list(computed_ahead((lambda: task(9),), thread=False)) == [(9, True)]


def test_an_error_in_the_background_is_raised_at_its_batch_and_ends_the_thread():
    def fails():
        raise OSError("gone")

    before = threading.active_count()
    results = computed_ahead([lambda: 1, fails, lambda: 3])
    assert next(results) == 1
    with pytest.raises(OSError, match="gone"):
        next(results)
    assert threading.active_count() == before


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cached", [1, 3000, 10**6])
def test_images_changed_in_parts_are_those_changed_together(monkeypatch, channels, cached):
    monkeypatch.setattr(batches, "CACHED", cached)
    images = split().train
    images = replace(images, pixels=images.pixels[:, :channels])
    index = torch.tensor([5, 0, 7, 5, 2])
    changes = draw_changes(5, images.shape, rng(), **STRONG)
    batch = prepared(images, index, [changes], torch.channels_last)
    torch.testing.assert_close(batch, changes.apply(images.floats(index)), atol=1e-6, rtol=0)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    none = slice(0, 0)  # of a process that has no part of a small batch
    empty = prepared(images, index[none], [changes.rows(none)], torch.channels_last)
    assert empty.shape == (0, *images.shape)


class Viewing(nn.Module):
    """A network that flattens by `view`, as many do, which fails on channels-last images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2, 1)
        self.head = nn.Linear(4 * 64, 4)

    def forward(self, images):
        maps = self.conv(images).relu()
        return self.head(maps.view(len(maps), -1))


def test_a_network_that_cannot_take_channels_last_is_trained_as_it_is():
    target = Target(Viewing(), split().classes, (3, 16, 16), head="head")
    assert fastest_layout(target.module, target.image_shape) is torch.contiguous_format
    trainer = Trainer(SMALL, target, split(), seed=0, device=CPU)
    first, second = (trainer.epoch(TrainingProgress(n, 2))["cross_entropy"] for n in (0, 1))
    assert second < first


def test_networks_are_trained_channels_last_and_returned_as_others():
    target = Target(nn.Sequential(*Viewing().children()), ("a",), (3, 16, 16), head="1")
    target.module.insert(1, nn.Flatten())
    assert fastest_layout(target.module, target.image_shape) is torch.channels_last
    module = target.module
    lay_out(module, torch.channels_last)
    assert module[0].weight.stride() == (27, 1, 9, 3)
    lay_out(module, torch.contiguous_format)
    assert module[0].weight.stride() == (27, 9, 3, 1)
    for weight in train().module.parameters():
        assert weight.stride() == torch.empty(weight.shape).stride()


def narrow():
    """Return a network with a strided 1×1 convolution of 4 channels."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 1, stride=2))


def test_narrow_strided_projections_never_see_channels_last():
    # Their gradient writes beyond its output on CPUs with AVX2 alone.
    network, seen = narrow(), []
    network[1].register_forward_hook(lambda _layer, inputs, _output: seen.extend(inputs))
    images = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    (usual,) = torch.autograd.grad(network(images.contiguous()).sum(), images)
    seen.clear()
    with channels_last(network):
        (grad,) = torch.autograd.grad(network(images).sum(), images)
    assert seen[0].is_contiguous()
    assert not seen[0].is_contiguous(memory_format=torch.channels_last)
    assert network[0].weight.stride() == (27, 9, 3, 1)
    assert_close(grad, usual)
    target = Target(narrow(), ("a",), (3, 8, 8), head="1")
    assert fastest_layout(target.module, target.image_shape) is torch.contiguous_format


def test_a_decoder_of_channels_last_features_keeps_its_narrow_shortcut_safe():
    block = Residual(4, 8, stride=2)
    features = torch.rand(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    seen = []
    block.beside[0].register_forward_hook(lambda _layer, inputs, _output: seen.extend(inputs))
    block(features)
    assert not seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("channels", "stride", "size"), [(16, 2, 1), (4, 1, 1), (4, 2, 3)])
def test_other_convolutions_may_see_channels_last(channels, stride, size):
    assert not narrow_projections(nn.Conv2d(channels, 8, size, stride=stride))


class Reads(TorchDispatchMode):
    """Counts how often a value of a tensor is read in this thread."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_values_are_not_read_in_each_step():
    counts = []
    for batch in (16, 4):
        target = Target(
            nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), split().classes, (3, 16, 16), "1"
        )
        config = replace(SMALL, batch=batch, optimizer="sgd")
        trainer = Trainer(config, target, split(), seed=0, device=CPU)
        with Reads() as reads:
            trainer.epoch(TrainingProgress(0, 2))
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_what_a_machine_lacks_is_replaced_with_one_line(monkeypatch, caplog):
    plain = train()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda module: 1 / 0)
    monkeypatch.setattr(accelerator, "MODEL_ERRORS", (ZeroDivisionError,))
    for settings, line in [
        ({"precision": "bf16"}, "has no fast arithmetic of 'bf16' on the device 'cpu'"),
        ({"precision": "16"}, "has no fast arithmetic of '16' on the device 'cpu'"),
        ({"compile": True}, "is not compiled, because that failed: division by zero"),
    ]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trained = train(replace(SMALL, **settings))
        assert [line in message and "\n" not in message for message in caplog.messages] == [True]
        assert same_weights(trained.module, plain.module)
        assert trained.info["numerics"] == {"precision": "32", "compiled": False}


@pytest.mark.parametrize("defenses", [[], [Bido(lambda_x=0.1, lambda_y=1.0)]])
def test_mixed_precision_follows_single_precision(monkeypatch, defenses):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    config = replace(SMALL, epochs=4)
    trained, plain = train(replace(config, precision="bf16"), defenses), train(config, defenses)
    assert not same_weights(trained.module, plain.module)
    assert all(weight.dtype == torch.float32 for weight in trained.module.parameters())
    assert trained.info["numerics"]["precision"] == "bf16"
    losses = [
        [row["cross_entropy"] for row in target.info["history"]] for target in (trained, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0][-1] < 0.8 * losses[0][0]


def test_the_scaler_of_half_precision_is_in_the_checkpoint(monkeypatch):
    """Fabric has no half precision on a CPU, so the scaler is put in by hand."""
    from lightning_fabric.plugins import MixedPrecision

    states = []
    for scale in (2.0**7, 2.0**9):
        device = FabricAccelerator(CPU, "32")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        monkeypatch.setattr(device._fabric.strategy, "_precision", plugin)
        states.append(device)
    assert states[0].tensors()["scale"] == 128
    states[0].restore(states[1].tensors())
    assert states[0].tensors() == states[1].tensors()
    FabricAccelerator(CPU, "32").restore({})


def test_compiled_networks_are_used_unless_layers_are_read(monkeypatch, caplog):
    class Compiled(nn.Module):
        calls = 0

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, images):
            Compiled.calls += 1
            return self.module(images)

    monkeypatch.setattr(torch, "compile", Compiled)
    config, plain = replace(SMALL, compile=True), train()
    trained = train(config)
    assert Compiled.calls > 3
    assert trained.info["numerics"]["compiled"]
    assert same_weights(trained.module, plain.module)
    with caplog.at_level(logging.WARNING):
        train(config, [Bido()])
    assert caplog.messages == [
        "target.compile: training is not compiled: a defense reads its layers"
    ]


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"compile": True}])
def test_gradients_of_single_images_need_full_precision(settings):
    with pytest.raises(ConfigError, match=r"dpsgd needs the gradient of each image.*leave target"):
        train(replace(SMALL, **settings), [Dpsgd()])


def test_a_dry_run_asks_for_nothing_special():
    assert supported_precision("16", torch.device("meta")) == "32"


@pytest.mark.slow
def test_a_compiled_training_agrees_with_a_plain_one():
    """To rounding; it falls back where there is no compiler."""
    plain, trained = train(), train(replace(SMALL, compile=True))
    for one, other in zip(trained.info["history"], plain.info["history"], strict=True):
        assert one["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=1e-2)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_batch_norm_gets_its_gradient_in_the_networks_layout(layout):
    class Watched(nn.BatchNorm2d):
        def forward(self, maps):
            output = super().forward(maps)
            output.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0]))
            return output

    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), Watched(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    images, results = torch.rand(2, 3, 8, 8).contiguous(memory_format=layout), []
    lay_out(module, layout)
    for laid_out in (False, True):
        seen: list[torch.Tensor] = []
        module.zero_grad()
        with gradients_laid_out(module, layout if laid_out else torch.preserve_format):
            module(images).square().sum().backward()
        results.append(module[0].weight.grad.clone())
        if laid_out:
            assert all(each.is_contiguous(memory_format=layout) for each in seen)
    assert len(seen) == 1
    assert not module[1]._forward_hooks
    assert_close(*results)
