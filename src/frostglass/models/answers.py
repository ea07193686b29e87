"""Whole networks that are given instead of trained: files, functions, objects and endpoints."""

import re
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Shape
from frostglass.models.base import class_name, inner, noise_images, probe
from frostglass.models.endpoint import SCHEMES, Endpoint, EndpointSettings
from frostglass.models.foreign import FILES, check_trust, files_of, load_network
from frostglass.models.hub_folder import HUB, Rebuild, hub_files, read_hub_folder
from frostglass.runtime.tensors import weights_digest

OBJECT = "object"
LEAST = 1e-12  # a probability of zero is taken for this one
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_objects: dict[str, nn.Module] = {}  # networks of this process, by a hash of their weights


class Order(nn.Module):
    """The order of the classes: a parameter, so that it is stored and moved as a head's rows are.

    It is the head of networks whose own head cannot be seen: its input are all their outputs.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(classes)), requires_grad=False)

    def forward(self, scores: Tensor) -> Tensor:
        return scores[:, self.weight.long()]


class Answers(nn.Module):
    """A network that is only asked: logits, or log-probabilities if it returns probabilities."""

    def __init__(self, network: nn.Module, classes: int, *, probabilities: bool = False) -> None:
        super().__init__()
        self.network, self.order, self.probabilities = network, Order(classes), probabilities

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.network(images)
        return self.order(outputs.clamp_min(LEAST).log() if self.probabilities else outputs)


def is_whole(weights: str | None) -> bool:
    """Return whether `weights` name a whole network, and not a checkpoint of an architecture."""
    kind = (weights or "").partition(":")[0]
    return weights is not None and (
        kind in (*FILES, *SCHEMES, OBJECT, HUB) or bool(FUNCTION.fullmatch(weights))
    )


def answers_only(weights: str | None) -> bool:
    """Return whether a given network can only be asked, without gradients."""
    return (weights or "").partition(":")[0] in (*FILES, *SCHEMES)


def check_source(weights: str, *, trust: bool) -> None:
    """Refuse a source of a network that can be refused without reading it."""
    kind = weights.partition(":")[0]
    if kind in FILES:
        check_trust(weights, trust=trust)
    if kind in SCHEMES:
        Endpoint.check(weights)


def source_files(weights: str) -> list[Path]:
    """List the files that a whole network is read from."""
    kind = weights.partition(":")[0]
    if kind == HUB:
        return hub_files(weights.partition(":")[2])
    return [] if kind in (*SCHEMES, OBJECT) else files_of(weights, None)


def hold(module: nn.Module) -> str:
    """Keep a network of this process, and return what `weights` call it."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {module!r}: give the network itself")
    name = weights_digest(module).hex()[:24]
    _objects[name] = module
    return f"{OBJECT}:{name}"


def read_whole(
    weights: str,
    classes: int,
    image_shape: Shape,
    endpoint: EndpointSettings,
    rebuild: Rebuild | None = None,
) -> nn.Module:
    """Return a given network in evaluation mode; `rebuild` builds one that `export` wrote."""
    kind, _, place = weights.partition(":")
    if kind in SCHEMES:
        return Answers(Endpoint(weights, classes, endpoint), classes).eval()
    if kind == OBJECT:
        if place not in _objects:
            raise ConfigError(
                f"weights: the network {weights} was given as an object to another process: call "
                "frostglass.audit_model with it again, in one process"
            )
        return deepcopy(_objects[place]).eval()
    network = read_hub_folder(place, image_shape, rebuild) if kind == HUB else load_network(weights)
    if kind not in (*FILES, HUB):
        return network
    outputs = probe(network, noise_images(network, image_shape, 2))
    if not isinstance(outputs, Tensor) or outputs.shape != (2, classes):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"{weights} returns {found} for 2 images of {'x'.join(map(str, image_shape))}: "
            f"expected scores (2, {classes}), one for each person; check the size of the images, "
            "and that there is one folder for each class"
        )
    if kind == HUB:
        return network
    return Answers(network, classes, probabilities=_sum_to_one(outputs)).eval()


def order_layer(module: nn.Module) -> str:
    """Return the name of the layer that orders the outputs of a network that is only asked."""
    if not isinstance(inner(module), Answers):
        return ""
    return "order" if module is inner(module) else "net.order"


def labels_only(module: nn.Module) -> bool:
    """Return whether an endpoint was seen to answer with labels alone."""
    network = inner(module)
    return (
        isinstance(network, Answers)
        and isinstance(network.network, Endpoint)
        and network.network.answered == "labels"
    )


def described(module: nn.Module, weights: str) -> str:
    """Return what a given network is called in tables."""
    kind, _, place = weights.partition(":")
    if kind in (*FILES, HUB):
        return Path(place).name
    return class_name(module) if kind == OBJECT else weights


def _sum_to_one(outputs: Tensor) -> bool:
    return not outputs.is_meta and bool(
        (outputs >= 0).all() and ((outputs.sum(1) - 1).abs() < 1e-3).all()
    )
