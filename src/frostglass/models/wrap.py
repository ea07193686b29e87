"""Wrap any `torch.nn.Module` as a target; the module need not inherit anything and is unchanged."""

from collections.abc import Sequence

from torch import Tensor, nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape, Target
from frostglass.models.base import (
    check_positive,
    class_name,
    noise_images,
    probe,
    refuse_probabilities,
)
from frostglass.models.cut import cut as cut_module
from frostglass.models.taps import check_layers, find_head, find_taps

IMAGES = 8


def wrap(
    module: nn.Module,
    *,
    classes: Sequence[str] | int,
    image_shape: Shape,
    head: str | None = None,
    taps: Sequence[str] | None = None,
    cut: str | None = None,
    attributes: bool = False,
) -> Target:
    """Make a target of a module that maps images in [0, 1] of `image_shape` to logits.

    The module is run on noise in evaluation mode and left unchanged. Its output may differ between
    calls: some defenses add noise. Noise cannot show whether it is the model that was meant: call
    `frostglass.examine(target, split)` before an attack.

    Args:
        classes: the names of the classes in the order of the logits, or their number.
        head: the layer whose input is the penultimate feature; detected by default.
        taps: layers that a defense or an analysis may read; three at even depths by default.
        cut: the layer whose features leave the device, if device and server split the network.
        attributes: the classes are attributes, and an image may have any number of them.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module to wrap, got {module!r}: call a function from the forward "
            "of a small module, and instantiate a class"
        )
    names = _names(classes)
    _check_logits(module, len(names), image_shape)
    check_layers(module, image_shape, head=head, taps=tuple(taps or ()))
    return Target(
        module=module,
        classes=names,
        image_shape=image_shape,
        head=find_head(module, image_shape) if head is None else head,
        taps=find_taps(module, image_shape) if taps is None else tuple(taps),
        cut=cut_module(module, cut, image_shape).tap if cut else "",
        attributes=attributes,
        info={
            "given": True,
            "architecture": class_name(module),
            "parameters": sum(weight.numel() for weight in module.parameters()),
        },
    )


def _names(classes: Sequence[str] | int) -> tuple[str, ...]:
    if isinstance(classes, int):
        check_positive("wrap", classes=classes)
        return tuple(map(str, range(classes)))
    if isinstance(classes, str) or len(set(classes)) != len(classes) or not classes:
        raise ModelError(
            f"expected a sequence of different class names, or their number; got {classes!r}"
        )
    return tuple(classes)


def _check_logits(module: nn.Module, classes: int, image_shape: Shape) -> None:
    name = class_name(module)
    logits = probe(module, noise_images(module, image_shape, IMAGES))
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{name} returns a {type(logits).__name__}: return the logits alone, for example from "
            "a small module around it"
        )
    if logits.ndim != 2 or len(logits) != IMAGES or not logits.is_floating_point():
        raise ModelError(
            f"{name} returns {logits.dtype} {tuple(logits.shape)} for {IMAGES} images: expected "
            f"float logits ({IMAGES}, {classes})"
        )
    if logits.shape[1] != classes:
        raise ModelError(
            f"{name} returns {logits.shape[1]} logits per image, but {classes} classes are named: "
            "make the two agree"
        )
    refuse_probabilities(name, logits)
