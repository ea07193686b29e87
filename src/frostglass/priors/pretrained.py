"""A prior that is already there: embedded in the package or in a file of the user's."""

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import ClassVar

from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.registry import nearest
from frostglass.core.types import Images, Shape
from frostglass.core.views import ModelView
from frostglass.priors._files import read_prior
from frostglass.priors.base import check_size, priors
from frostglass.store.files import Work


def embedded() -> list[str]:
    """Names of the priors that ship with the package."""
    return sorted(
        f.name.removesuffix(".safetensors")
        for f in resources.files("frostglass.priors").joinpath("weights").iterdir()
        if f.name.endswith(".safetensors")
    )


@priors.register
@parameters
class Pretrained:
    """A prior from a file instead of from training: one that ships with the package, or any file a prior was saved to.

    `faces32` is a wgan and `styles32` a stylegan2, both trained on 20,000 public people of the `faces` world at 32 pixels; `make prior` and `make styles` train
    them again. A prior of coloured pictures serves grey data, and the other way round.

    Args:
        weights: the name of an embedded prior, or the path of a `prior.safetensors`.
        resize: accept a prior that makes pictures of another size than the data has; they are resized for the target.
    """

    weights: str = "faces32"
    resize: bool = False

    ready: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    needs: ClassVar[None] = None

    def path(self) -> Path:
        """Where the weights are."""
        if self.weights in embedded():
            return Path(
                str(
                    resources.files("frostglass.priors").joinpath(
                        "weights", f"{self.weights}.safetensors"
                    )
                )
            )
        if not self.weights.endswith(".safetensors"):
            raise ConfigError(
                f"no embedded prior named {self.weights!r}: {nearest(self.weights, embedded())}; or give the path of a .safetensors file"
            )
        return Path(self.weights)

    def files(self) -> list[Path]:
        """Files this prior reads."""
        return [self.path()]

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Read the prior; `public` is only asked for its shape."""
        return self.read(public.shape)

    def read(self, image_shape: Shape) -> Prior:
        """The prior, if it fits images of this shape."""
        prior = read_prior(self.path())
        if self.resize:
            prior = replace(prior, info={**prior.info, "resize": True})
        if prior.tied_to is not None:
            raise CheckpointError(
                f"{self.weights} was fitted to one target and cannot serve another: train a prior for this target"
            )
        if not self.resize:
            check_size(self.weights, prior.image_shape, image_shape)
        return prior
