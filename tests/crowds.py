"""A world in closed form: a class that accepts two people, and what attackers know of them.

Images are points (x, y) of the unit square, and the generator is the identity. Class 0 accepts two
people, at LEFT and at RIGHT, class 1 one more, and class 2 nobody in particular.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Reconstructions, Target
from worlds import linear_world, rng

LEFT, RIGHT, OTHER = (0.2, 0.8), (0.8, 0.2), (0.2, 0.2)
SHAPE = (1, 1, 2)
# The loss and the optimiser of a search that needs a few dozen steps here.
SEARCH = {
    "loss": "margin", "optimizer": "adam", "lr": 0.05, "steps": 60, "weight": 1.0, "coupling": 1,
    "critic_weight": 0.0, "clamp": 0.0,
}  # fmt: skip


class Hills(nn.Module):
    """How near images are to each of some places, (N, places): 1 / (1 + 10 d²)."""

    def __init__(self, *places: tuple[float, float]):
        super().__init__()
        self.register_buffer("places", torch.tensor(places))

    def forward(self, images: Tensor) -> Tensor:
        gaps = images.flatten(1)[:, None] - self.places
        return 1 / (1 + 10 * (gaps**2).sum(2))


def classifier(left: float = 10.0, right: float = 10.0) -> nn.Module:
    """Logits of three classes; `left` and `right` say how much class 0 likes its two people."""
    head = nn.Linear(3, 3)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[left, right, 0.0], [0.0, 0.0, 10.0], [0.0, 0.0, 0.0]]))
        head.bias.copy_(torch.tensor([0.0, 0.0, 3.0]))
    return nn.Sequential(Hills(LEFT, RIGHT, OTHER), head)


def crowd(left: float = 10.0, right: float = 10.0) -> Target:
    """A target whose class 0 accepts two people; the louder one has the larger number."""
    return Target(classifier(left, right), ("crowd", "one", "none"), SHAPE, head="1", key="crowd")


def plane(*students: nn.Module) -> Prior:
    """The identity as a generator, with networks that imitate the target."""
    return replace(linear_world(latent=2)[1], students=tuple(students))


def strangers(count: int = 64) -> Images:
    """Public images spread over the square, with an attribute: whether they are on the right."""
    pixels = torch.randint(0, 256, (count, *SHAPE), generator=rng(1), dtype=torch.uint8)
    labels = torch.arange(count) % 8
    right = pixels[:, 0, 0, :1] > 127
    names = tuple(f"stranger {number}" for number in range(8))
    return Images(pixels, labels, names, ("",) * count, right, ("right",), key="strangers")


def identity_embedder() -> Target:
    """An embedder whose penultimate feature is the image itself."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    return Target(module, ("a", "b"), SHAPE, head="1", key="embedder")


def knowledge(*students: nn.Module) -> Assets:
    return Assets(public=strangers(), prior=plane(*students), embedder=identity_embedder())


def people_in(result: Reconstructions, row: int = 0) -> list[str]:
    """Who the images of one attacked person show, in their order: "left", "right" or "?"."""
    places = {"left": LEFT, "right": RIGHT}
    return [
        next((n for n, at in places.items() if (image - torch.tensor(at)).norm() < 0.15), "?")
        for image in result.images[row].flatten(1)
    ]
