"""An undefended epoch of the training loop over a bare loop with the same network, batches and optimiser."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric

from benchmarks.timing import ratio
from frostglass.data.faces import Faces
from frostglass.defenses.base import Moment
from frostglass.training import Training, _epoch, _optimizer, augment, untrained

LIMIT = 1.10


def measure() -> Iterator[str]:
    images, _ = Faces(identities=10, images=64, public_identities=2, public_images=1).tables()
    config = Training(model="cnn", options={"width": 32}, batch=64)
    target = untrained(config, images.names, images.shape, (), seed=0)
    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(target.module, _optimizer(config, list(target.module.parameters())))
    bare = untrained(config, images.names, images.shape, (), seed=0).module.train()
    rule = _optimizer(config, list(bare.parameters()))

    def ours() -> None:
        _epoch(config, fabric, module, optimizer, target, images, (), (), Moment(0, 1), seed=0)

    def floor() -> None:
        dice = torch.Generator().manual_seed(0)
        for index in torch.randperm(len(images), generator=dice).tensor_split(math.ceil(len(images) / config.batch)):
            pictures = augment(images.floats(index), config.flip, config.shift, dice)
            loss = F.cross_entropy(bare(pictures), images.labels[index])
            rule.zero_grad(set_to_none=True)
            loss.backward()
            rule.step()

    times, mine, theirs = ratio(ours, floor, rounds=7)
    yield f"undefended training epoch: {times:.3f} × bare loop (limit {LIMIT}); {mine:.2f} s against {theirs:.2f} s"
