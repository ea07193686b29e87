"""What the second process does in tests of several; it imports little, so that it starts soon."""

import torch
from torch import nn

from frostglass.core.ranks import joint_batch_norm
from frostglass.defenses.training._dependence import gaussian_gram, measure


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
            nn.Linear(48, 4), nn.BatchNorm1d(4, momentum=None),
        ).double()  # fmt: skip


def coupled_gradients(ranks, module, images):
    """Return the loss of a whole batch, all gradients and buffers.

    The loss couples samples by both measures of BiDO.
    """
    count = len(images)
    with joint_batch_norm(ranks, module):
        outputs = ranks.gathered(module(images[ranks.part(count)]), count)
    layer, seen = gaussian_gram(outputs), gaussian_gram(images)
    loss = measure("hsic_nocco")(seen, layer) + measure("coco_frobenius")(seen, layer)
    loss = loss + (outputs**3).mean()
    loss.backward()
    ranks.average(module.parameters())
    gradients = [weight.grad for weight in module.parameters()]
    return [loss.detach(), *gradients, *module.buffers()]


def follow(ranks, images):
    coupled_gradients(ranks, network(), images)


def fail(ranks):
    raise ValueError("of the second\nand more")
