"""RoLSS: a residual network without the shortcuts of its last stage."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.defenses.base import Defense, TrainingSize, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.models.base import class_name
from frostglass.models.shortcuts import last_stage, scale_shortcuts


@defenses.register
@parameters
class Rolss(Defense):
    """Removal of last-stage skip connections: gradients no longer bypass the last residual blocks.

    A block of the last stage returns F(x) + k · s(x) instead of F(x) + s(x), where s(x) is x or its
    projection: RoLSS is k = 0, and a k between 0 and 1 is SSF, the scaled skip connection. Training
    is as ever, from scratch or from weights of the whole network. The paper's reason is that
    shortcuts carry the gradient of an attack past the layers, those of the last stage most of all.
    It is a defense by gradients: an attack that needs none may not notice it.

    Use: a residual network that is trained from scratch; audit it without gradients too. On our
        small `resnet` it hid nobody.
    Cost: none; 0.83 to 0.98 times the time of an undefended training in
        faces/skip-connections.
    Paper: Koh, Ho, Nguyen, Cheung, On the Vulnerability of Skip Connections to Model Inversion
        Attacks, ECCV 2024, arXiv 2409.01696.
    Differs: the layers on a removed shortcut are removed with it; the published code keeps them
        unused. Its ResNet also drops the shortcuts of the last fifth of stage 3, whatever is
        asked; here only the last stage changes. The last stage are the blocks whose outputs have
        the shape of the last block's. The paper's third design, training in two stages (TTS), and
        the concatenations of DenseNet and the blocks of transformers are not here.

    Args:
        scale: k, the factor on the shortcuts: 0 removes them (RoLSS), 1 disables the defense.
    """

    scale: Annotated[float, Field(ge=0, le=1)] = 0.0

    title = "RoLSS"
    disabled: ClassVar = {"scale": 1.0}
    takes_attributes = True

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"scale": Real(0, 0.9)}

    @property
    def active(self) -> bool:
        return self.scale < 1

    def prepare(self, target: Target, *, seed: int) -> Target:
        if not self.active:
            return target
        blocks = last_stage(target.module, target.image_shape)
        if not blocks:
            raise ConfigError(
                "rolss removes skip connections, and found no residual block in "
                f"{class_name(target.module)}: choose a residual network, such as resnet, "
                "resnet34, ir152, timm:resnet18 or torchvision:resnet18"
            )
        scale_shortcuts(target.module, blocks, self.scale)
        left = dict(target.module.named_modules())
        return replace(target, taps=tuple(tap for tap in target.taps if tap in left))

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        if not self.active:
            return {}
        return {"blocks": last_stage(target.module, target.image_shape), "scale": self.scale}
