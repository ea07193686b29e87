"""DP-SGD: clip the gradient of each image and add noise to their sum, computed by Opacus."""

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.data.base import listed
from frostglass.defenses.base import Defense, Part, TrainingSize, defenses
from frostglass.models.base import MODEL_ERRORS, first_line, noise_images, probe
from frostglass.runtime.seeding import seeded

# A subclass may do more than normalise, so it is not replaced.
REPLACEABLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# The grid of the prv accountant grows with epsilon: at 100 it takes half a minute and gigabytes.
PRV_LIMIT = 50.0
ORDERS = (
    [1 + k / 100 for k in range(1, 10)]
    + [1 + k / 10 for k in range(1, 100)]
    + [*range(11, 64)]
    + [2**k for k in range(6, 12)]
)


def opacus_classes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `SampleGradients` and `PrivateOptimizer`; Opacus is optional and slow to import."""
    try:
        from frostglass.defenses.training import _opacus
    except ImportError as error:
        raise ConfigError(
            f"dpsgd needs Opacus ({first_line(error)}): "
            "install it with `pip install 'frostglass[dp]'`"
        ) from error
    return _opacus.SampleGradients, _opacus.PrivateOptimizer


def group_norm(layer: Any, norm: str) -> nn.GroupNorm:
    """Return a group norm with a batch norm's weights; instance norm has a group per channel."""
    channels = layer.num_features
    groups = channels if norm == "instance" else math.gcd(32, channels)
    new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine).train(layer.training)
    new.weight, new.bias = layer.weight, layer.bias
    return new


def blind_norms(module: nn.Module, images: Tensor) -> list[str]:
    """Name the group norms with one value per group, which return their bias for any image.

    Leaves hooks on the module: pass a copy.
    """
    names: list[str] = []

    def check(name: str) -> Callable[..., None]:
        return lambda layer, inputs: (
            names.append(name) if inputs[0][0].numel() == layer.num_groups else None
        )

    for name, layer in module.named_modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(check(name))
    probe(module, images)
    return names


def refusals(module: nn.Module, images: Tensor) -> list[str]:
    """List why per-sample gradients cannot be computed, by trying; pass a copy of the module."""
    module.train()
    images = images.requires_grad_()
    buffers = [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers()]
    with seeded(0, "dpsgd", "trial"):
        try:
            (slopes,) = torch.autograd.grad(module(images)[0].sum(), images)
            opacus_classes()[0](module)
            module(images).logsumexp(1).mean().backward()
        except MODEL_ERRORS as error:
            return [f"Opacus cannot follow this network: {first_line(error)}: choose another model"]
    if slopes[1:].any():
        return [
            "the logits of one image depend on the others in its batch, which voids the guarantee: "
            "choose another model"
        ]
    if kept := [name for name, buffer, before in buffers if not torch.equal(buffer, before)]:
        return [f"{listed(kept)} store statistics of images without noise: choose another model"]
    if wrong := _wrong_sums(module, len(images)):
        return [
            "per-sample gradients are missing or do not add up to the batch's gradient at "
            f"{listed(wrong)}: choose another model"
        ]
    return []


def _wrong_sums(module: nn.Module, images: int) -> list[str]:
    """Name the trained weights whose per-sample gradients do not average to the batch gradient."""
    trained: dict[str, Any] = {
        name: weight for name, weight in module.named_parameters() if weight.requires_grad
    }
    # Relative to the largest gradient anywhere: some are zero but for rounding, such as that of a
    # bias before a norm.
    largest = [float(w.grad.abs().max()) for w in trained.values() if w.grad is not None]
    slack = 1e-3 * max(largest, default=0.0)

    def adds_up(weight: Any) -> bool:
        samples = weight.grad_sample
        return (
            samples is not None
            and len(samples) == images
            and torch.allclose(samples.mean(0), weight.grad, rtol=1e-3, atol=slack)
        )

    return [name for name, weight in trained.items() if not adds_up(weight)]


def schedule(records: int, batch: int) -> tuple[int, float]:
    """Return the steps of an epoch, and each image's probability of taking part in a step."""
    return max(1, round(records / batch)), min(1.0, batch / records)


def epsilon(
    noise: float, rate: float, steps: int, delta: float, accountant: str
) -> tuple[float, str]:
    """Return the ε spent and its accountant, which is rdp where prv would need too much memory."""
    opacus_classes()
    from opacus.accountants import PRVAccountant, RDPAccountant

    renyi, numeric = RDPAccountant(), PRVAccountant()
    renyi.history = numeric.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        # The bound holds at any order; it is only less tight.
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)
        bound = float(renyi.get_epsilon(delta, alphas=ORDERS))
    if accountant == "prv" and rate < 1 and bound <= PRV_LIMIT:
        return float(numeric.get_epsilon(delta)), "prv"
    return bound, "rdp"


@defenses.register
@parameters
class Dpsgd(Defense):
    """DP-SGD: bound the effect of each image on the weights, and add noise of that size.

    Each step takes every image with probability q = batch / images, and with their gradients g_i
    over all trained weights uses (Σ_i g_i · min(1, S / |g_i|) + N(0, σ² S² I)) / batch. The result
    is (ε, δ)-private towards adding or removing one training image: a guarantee about membership.
    About inversion it guarantees nothing, and a person with k images has only (about) k ε.

    Use: a bound on what single training images change is asked for; costs much accuracy and does
        not bound inversion itself.
    Cost: an epoch takes 2.10 times as long (a small `cnn`).
    Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, arXiv 1607.00133;
        Opacus, arXiv 2109.12298.
    Differs: any optimiser follows, not only SGD. The clip factor is Opacus's S / (|g_i| + 1e-6).
        The noise is repeatable, drawn from the run's seed, so the guarantee holds only towards
        those who do not know the seed; it is not safe against attacks on floating-point rounding
        either. The choice of the epoch reads validation images, and losses and accuracies are
        reported, without noise: ε covers the weights and the training images. In a step every
        image has a gradient of its own: memory grows with batch × weights.

    Args:
        noise: σ, the noise in units of `clip`; 0 clips only and guarantees nothing. With 27,018
            images, batches of 64 and 50 epochs 0.5, 1 and 2 give ε of 16, 2.0 and 0.73. MIBench's
            0.01 gives a hundred million.
        clip: S, the largest norm of an image's gradient; none leaves gradients alone (then `noise`
            must be 0).
        delta: δ, the probability with which the guarantee may fail; below one over the number of
            images.
        norm: what batch norm becomes, because it mixes images: "group" with gcd(32, channels)
            groups, "instance" with a group per channel; weights are carried over, running
            statistics are lost. "keep" changes nothing, and is refused if there is batch norm.
        accountant: "rdp", an upper bound for any noise, or "prv", about a tenth tighter; above
            ε = 50 prv would need gigabytes, and where every image is in every batch it does not
            apply: rdp's bound is given (and named) instead. That is why rdp is the default.
    """

    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    norm: Literal["group", "instance", "keep"] = "group"
    accountant: Literal["rdp", "prv"] = "rdp"

    title = "DP-SGD"
    disabled: ClassVar = {"noise": 0.0, "clip": None, "norm": "keep"}

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise ValueError(f"noise {self.noise} is in units of clip: give a clip, or noise 0")

    def replaces(self) -> frozenset[Part]:
        return frozenset() if self.clip is None else frozenset({"batches"})

    def separates_samples(self) -> bool:
        return self.clip is not None

    def during_stage(self) -> Defense | None:
        return None if self.norm == "keep" else Dpsgd(noise=0.0, clip=None, norm=self.norm)

    def prepare(self, target: Target, *, seed: int) -> Target:
        if self.norm != "keep":
            for parent in list(target.module.modules()):
                for name, layer in list(parent.named_children()):
                    if type(layer) in REPLACEABLE:
                        setattr(parent, name, group_norm(layer, self.norm))
        return target

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        images = noise_images(target.module, target.image_shape, 2)
        if self.norm != "keep" and (blind := blind_norms(deepcopy(target.module), images)):
            other = "another model or larger images" if self.norm == "group" else 'norm = "group"'
            return [
                f"the norms {listed(blind)} see one value at a time and would erase it: use {other}"
            ]
        if self.clip is None:
            return []
        if self.delta * size.records >= 1:
            return [
                f"delta must be below one over the {size.records} training images, or publishing "
                f"an image would satisfy it; got {self.delta}"
            ]
        mixing = [
            name for name, layer in target.module.named_modules() if isinstance(layer, _BatchNorm)
        ]
        if mixing:
            remedy = 'use norm = "group"' if self.norm == "keep" else "choose another model"
            return [
                f"BatchNorm layers ({listed(mixing)}) mix the samples of a batch, which voids the "
                f"guarantee: {remedy}"
            ]
        opacus_classes()
        from opacus.validators import ModuleValidator

        copy = deepcopy(target.module).train()
        return [
            f"Opacus refuses a layer: {first_line(error)}"
            for error in ModuleValidator.validate(copy)
        ] or refusals(copy, images)

    def batches(self, labels: Tensor, size: int, rng: torch.Generator) -> list[Tensor]:
        steps, rate = schedule(len(labels), size)
        return [
            (torch.rand(len(labels), generator=rng, dtype=torch.float64) < rate).nonzero()[:, 0]
            for _ in range(steps)
        ]

    def optimizer(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, size: TrainingSize
    ) -> torch.optim.Optimizer:
        if self.clip is None:
            return optimizer
        batch = min(size.records, size.batch)
        return opacus_classes()[1](optimizer, module, noise=self.noise, clip=self.clip, batch=batch)

    def facts(self, target: Target, size: TrainingSize) -> dict[str, Any]:
        if self.clip is None:
            return {}
        steps, rate = schedule(size.records, size.batch)
        steps *= size.epochs
        bound, accountant, note = None, None, "without noise there is no guarantee"
        if self.noise:
            bound, accountant = epsilon(self.noise, rate, steps, self.delta, self.accountant)
            note = (
                "for the membership of one training image, not for inversion; "
                "holds while the seed stays secret"
            )
        return {
            "epsilon": bound,
            "delta": self.delta,
            "noise": self.noise,
            "clip": self.clip,
            "sample_rate": rate,
            "steps": steps,
            "accountant": accountant,
            "note": note,
        }
