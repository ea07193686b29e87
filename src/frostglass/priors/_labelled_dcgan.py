"""GMI's generator and critic with classes: the simpler networks of LOKT's code."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.networks.dcgan import build_critic, build_generator
from frostglass.priors._residual import LabelledNorm


class LabelledDcgan(nn.Module):
    """Images in [0, 1] from latents (N, latent) and class labels (N,).

    GMI's generator, with class-conditional batch norm after its transposed convolutions.
    """

    def __init__(self, latent: int, width: int, image_shape: Shape, classes: int):
        super().__init__()
        self.layers = nn.ModuleList()
        for layer in build_generator(latent, width, image_shape):
            if isinstance(layer, nn.BatchNorm2d):
                layer = LabelledNorm(layer.num_features, classes)
            self.layers.append(layer)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        maps = latents
        for layer in self.layers:
            maps = layer(maps, labels) if isinstance(layer, LabelledNorm) else layer(maps)
        return maps

    @torch.no_grad()
    def adopt(self, generator: nn.Module) -> None:
        """Take the weights of a generator without classes, the same for all classes."""
        for ours, theirs in zip(self.layers, generator.children(), strict=True):
            if not isinstance(ours, LabelledNorm):
                ours.load_state_dict(theirs.state_dict())
                continue
            assert isinstance(theirs, nn.BatchNorm2d)  # as `build_generator` makes it
            state = theirs.state_dict()
            ours.scale.weight.copy_(state.pop("weight").expand_as(ours.scale.weight))
            ours.shift.weight.copy_(state.pop("bias").expand_as(ours.shift.weight))
            ours.norm.load_state_dict(state)


class ClassifyingDcgan(nn.Module):
    """D(x) (N,), larger for more realistic images, and the logits C(x) (N, K) of classes.

    GMI's critic; C is a linear layer of its last maps, which are pooled by their maximum.
    """

    def __init__(self, width: int, image_shape: Shape, classes: int):
        super().__init__()
        *body, last, _ = build_critic(width, image_shape[0], image_shape[1])
        assert isinstance(last, nn.Conv2d)
        self.body, self.real = nn.Sequential(*body), last
        self.classes = nn.Linear(last.in_channels, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.body(images)
        pooled = F.max_pool2d(maps, 3, 2).flatten(1)
        return self.real(maps).flatten(), self.classes(pooled)

    def adopt(self, critic: nn.Module) -> None:
        """Take the convolutions of a critic without classes, if it has the same shapes."""
        *body, _, _ = critic.children()
        theirs, ours = nn.Sequential(*body).state_dict(), self.body.state_dict()
        if [tensor.shape for tensor in theirs.values()] == [t.shape for t in ours.values()]:
            self.body.load_state_dict(theirs)
