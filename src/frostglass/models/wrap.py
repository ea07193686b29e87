"""Any `torch.nn.Module` as a target: nothing to inherit from, and the module stays as it was."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape, Target
from frostglass.models.base import check_positive, inner, noise_images, probe
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
    """A target around `module`, which must map float images in [0, 1] of `image_shape` to one logit a class.

    The module is tried on noise in evaluation mode and left untouched. An output that changes from call to call is allowed: some
    defenses add noise.

    Args:
        classes: the names of the classes in the order of the logits, or their number.
        head: the layer whose input is the penultimate feature; found when not given.
        taps: layers that a defense or an analysis may read; three at even depths when not given.
        cut: the layer behind which features leave the device, where the network is split between one and a server.
        attributes: the classes are attributes, any number of which a picture may have.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module to wrap, got {module!r}: a function is called by the forward of a small module of your own, a class is made first"
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
            "architecture": type(inner(module)).__name__,
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
    name = type(inner(module)).__name__
    logits = probe(module, noise_images(module, image_shape, IMAGES))
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{name} gives a {type(logits).__name__}: return the logits alone, from a small module around it if need be"
        )
    if logits.ndim != 2 or len(logits) != IMAGES or not logits.is_floating_point():
        raise ModelError(
            f"{name} gives {logits.dtype} {tuple(logits.shape)} for {IMAGES} images: expected float logits ({IMAGES}, {classes})"
        )
    if logits.shape[1] != classes:
        raise ModelError(
            f"{name} gives {logits.shape[1]} logits an image and {classes} classes are named: the two must agree"
        )
    # Softmax twice flattens every gradient, which would make any model look hard to invert.
    if (
        classes > 1
        and logits.min() >= 0
        and torch.allclose(logits.sum(1), torch.ones(IMAGES, device=logits.device), atol=1e-3)
    ):
        raise ModelError(f"{name} gives probabilities; return logits: remove its softmax")
