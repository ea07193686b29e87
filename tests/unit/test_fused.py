"""Fused optimiser steps: the same as torch's plain ones, in every memory layout that occurs."""

import copy

import pytest
import torch
from torch import nn

from frostglass.core.types import Split
from frostglass.data.faces import Faces
from frostglass.defenses.base import Defense
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.dpsgd import Dpsgd
from frostglass.runtime.fused import fuse
from frostglass.training.build import untrained
from frostglass.training.settings import Training
from frostglass.training.trainer import Trainer, optimizer_of


def network() -> nn.Module:
    """One layer of each kind whose weights can have several memory layouts."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.utils.parametrizations.spectral_norm(
            nn.Conv2d(6, 5, 3)
        ), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("penalised", [False, True])
def test_fused_steps_are_those_of_the_plain_optimiser(optimizer, layout, penalised):
    config = Training(optimizer=optimizer, lr=1e-2, weight_decay=1e-2)
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 4
    modules = [copy.deepcopy(network()).to(memory_format=layout) for _ in range(2)]
    for module, fused in zip(modules, (False, True), strict=True):
        weights = list(module.parameters())
        rule = optimizer_of(config, weights)
        assert not fused or fuse(rule).param_groups[0]["fused"]
        for _ in range(3):
            rule.zero_grad()
            shown = images.contiguous(memory_format=layout).requires_grad_()
            loss = nn.functional.cross_entropy(module(shown), labels)
            if penalised:  # as critics are: a second derivative comes to the weights
                (gradient,) = torch.autograd.grad(loss, shown, create_graph=True)
                loss = loss + gradient.square().sum()
            loss.backward()
            rule.step()
    plain, quick = (list(module.parameters()) for module in modules)
    start = list(network().parameters())
    assert all(not torch.equal(a, b) for a, b in zip(quick, start, strict=True))
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-6)


def test_a_dry_run_is_not_fused():
    rule = torch.optim.SGD([nn.Parameter(torch.zeros(2, device="meta"))])
    assert not fuse(rule).param_groups[0]["fused"]


class OwnOptimizer(Defense):
    name = "own"

    def optimizer(self, module, optimizer, size):
        return copy.copy(optimizer)


@pytest.mark.parametrize(
    ("defenses", "fused"),
    [
        ((), True),
        ((Bido(),), True),
        ((Dpsgd(clip=None, noise=0.0),), True),
        ((OwnOptimizer(),), False),
    ],
)
def test_a_defense_with_an_optimiser_gets_a_plain_one(defenses, fused):
    images, public = Faces(identities=4, images=4, public_identities=2, public_images=1).tables()
    config = Training(model="cnn", options={"width": 4}, batch=8, epochs=1)
    target = untrained(config, images.names, images.shape, defenses, seed=0)
    split = Split(images, images, images, public)
    trainer = Trainer(config, target, split, defenses, seed=0, device=torch.device("cpu"))
    assert bool(trainer._optimizer.param_groups[0]["fused"]) is fused
