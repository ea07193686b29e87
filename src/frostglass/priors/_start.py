"""A prior whose generator another training starts from."""

import torch
from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Shape
from frostglass.networks.dcgan import build_generator
from frostglass.priors.pretrained import Pretrained


def read_start(name: str, latent: int, width: int, image_shape: Shape) -> Prior:
    """Read the prior of that name or path; refuse it if its generator has another shape."""
    start = Pretrained(weights=name).read(image_shape)
    with torch.device("meta"):
        generator = build_generator(latent, width, image_shape)
    if _shapes(start.generator) != _shapes(generator):
        method = start.info["method"]
        sizes = ["×".join(map(str, shape)) for shape in (start.image_shape, image_shape)]
        raise ConfigError(
            f"prior.start: {name} holds the {method['name']} generator of latent "
            f"{start.latent}, width {method['parameters'].get('width')} and images of "
            f"{sizes[0]}, expected latent {latent}, width {width} and images of "
            f"{sizes[1]}: set prior.latent and prior.width to its values, or leave prior.start "
            "out"
        )
    return start


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
