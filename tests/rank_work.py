"""What the second process does in tests of several; it imports little, so that it starts soon."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from frostglass.core.ranks import joint_batch_norm
from frostglass.core.types import Images, Split
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


class DoubleImages(Images):
    """Images in double precision, in which rounding cannot hide a wrong gradient."""

    def floats(self, index: Tensor | slice = slice(None)) -> Tensor:
        return super().floats(index).double()

    def at(self, index: Tensor) -> Images:
        return DoubleImages(**vars(super().at(index)))


def in_double(split: Split) -> Split:
    parts = {name: getattr(split, name) for name in ("train", "validation", "test", "public")}
    return replace(split, **{name: DoubleImages(**vars(part)) for name, part in parts.items()})
