"""Shortcuts around residual blocks: where they are, and networks with weaker ones or none."""

from typing import ClassVar

from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.taps import trace

# Blocks of other libraries that pass their input through `downsample`, if they have it, and add it.
FOREIGN = {
    (library, block)
    for library in ("timm.models.resnet", "torchvision.models.resnet")
    for block in ("BasicBlock", "Bottleneck")
}


class ResidualBlock(nn.Module):
    """A block that adds its input, times `shortcut_scale`, to what its layers make of it.

    `projection` names the attribute with the layers on the shortcut.
    """

    projection: ClassVar[str]
    shortcut_scale: float = 1.0

    def scale_shortcut(self, scale: float) -> None:
        """Multiply the shortcut by a factor; 0 removes it, and the layers on it."""
        self.shortcut_scale = scale
        if not scale:
            setattr(self, self.projection, None)


class ScaledShortcut(nn.Module):
    """The shortcut of a block of another library, times a factor; 0 is no shortcut."""

    def __init__(self, inner: nn.Module | None, scale: float):
        super().__init__()
        self.inner = inner if scale else None
        self.scale = scale

    def forward(self, maps: Tensor) -> Tensor:
        if not self.scale:
            return maps.new_zeros(())
        return scaled(maps if self.inner is None else self.inner(maps), self.scale)


def scaled(shortcut: Tensor, scale: float) -> Tensor:
    return shortcut if scale == 1 else scale * shortcut


def last_stage(module: nn.Module, image_shape: Shape) -> list[str]:
    """Return the residual blocks whose outputs have the shape of the last one's, in order.

    Blocks of one stage have outputs of one shape. A network without residual blocks has none.
    """
    calls, _ = trace(module, image_shape)
    shapes = {call.name: call.shape for call in calls if _has_shortcut(call.layer)}
    last = list(shapes.values())[-1:]
    return [name for name, shape in shapes.items() if [shape] == last]


def scale_shortcuts(module: nn.Module, names: list[str], scale: float) -> None:
    """Multiply the shortcuts of the named blocks by a factor; 0 removes them."""
    for name in names:
        block = module.get_submodule(name)
        if isinstance(block, ResidualBlock):
            block.scale_shortcut(scale)
        else:
            block.downsample = ScaledShortcut(block.downsample, scale)  # type: ignore[arg-type]


def _has_shortcut(layer: nn.Module) -> bool:
    kind = type(layer)
    return isinstance(layer, ResidualBlock) or (kind.__module__, kind.__name__) in FOREIGN
