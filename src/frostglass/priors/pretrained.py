"""A prior that is already there: embedded in the package or in a file of the user's."""

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import ClassVar

from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.registry import nearest
from frostglass.core.types import Shape
from frostglass.priors._files import read_prior
from frostglass.priors.base import LOADED, PriorMethod, PriorTask, check_size, on_device, priors

WEIGHTS = Path(str(resources.files("frostglass.priors").joinpath("weights")))


def embedded() -> list[str]:
    """List the names of the priors that ship with the package."""
    return sorted(path.stem for path in WEIGHTS.glob("*.safetensors"))


@priors.register
@parameters
class Pretrained(PriorMethod):
    """A prior from a file instead of from training: embedded in the package, or saved earlier.

    `faces32` is a wgan and `styles32` a stylegan2, both trained on 20,000 public people of the
    `faces` world at 32 pixels; `make prior` and `make styles` train them again. A prior of coloured
    images serves grey data, and the other way round.

    Use: trying things on the embedded faces, or a prior that was trained and saved before.

    Args:
        weights: the name of an embedded prior, or the path of a `prior.safetensors`.
        resize: accept a prior that makes images of another size than the data has; they are resized
            for the target.
    """

    weights: str = "faces32"
    resize: bool = False

    title: ClassVar[str] = "Pretrained prior"
    ready: ClassVar[bool] = True

    def path(self) -> Path:
        """Return where the weights are."""
        if self.weights in embedded():
            return WEIGHTS / f"{self.weights}.safetensors"
        if not self.weights.endswith(".safetensors"):
            raise ConfigError(
                f"no embedded prior named {self.weights!r}: {nearest(self.weights, embedded())}; "
                "or give the path of a .safetensors file"
            )
        return Path(self.weights)

    def files(self) -> list[Path]:
        return [self.path()]

    def fit(self, task: PriorTask) -> Prior:
        return on_device(self.read(task.public.shape), task.device)

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        return self.read(image_shape)

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        raise CheckpointError("a prior's file must record the method that trained it")

    def read(self, image_shape: Shape) -> Prior:
        """Read the prior; refuse it if it does not fit images of this shape."""
        prior = read_prior(self.path())
        if prior.tied_to is not None:
            raise CheckpointError(
                f"{self.weights} was fitted to one target and cannot serve another: train a prior "
                "for this target"
            )
        if self.resize:
            return replace(prior, info={**prior.info, "resize": True})
        check_size(self.weights, prior.image_shape, image_shape)
        return prior

    def budget(self, size: AuditSize) -> Budget:
        return Budget(LOADED)
