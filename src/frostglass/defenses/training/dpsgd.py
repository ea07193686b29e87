"""DP-SGD: the gradient of each picture is clipped and noise is added to their sum, computed by Opacus."""

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters
from frostglass.core.types import Target
from frostglass.data.base import listed
from frostglass.defenses.base import Defense, Part, Size, defenses
from frostglass.models.base import MODEL_ERRORS, first_line, noise_images, probe
from frostglass.runtime.seeding import seeded

PLAIN = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)  # a subclass may do more than normalise, so it is not swapped
PRV_LIMIT = 50.0  # the grid of the prv accountant grows with epsilon: at 100 it takes half a minute and gigabytes, later all memory
ORDERS = (
    [1 + k / 100 for k in range(1, 10)]
    + [1 + k / 10 for k in range(1, 100)]
    + [*range(11, 64)]
    + [2**k for k in range(6, 12)]
)


@cache
def opacus_classes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Opacus's per-sample gradients and its optimiser, fitted to our loop. Made on demand: the extra may be missing and takes seconds."""
    try:
        from opacus.grad_sample import GradSampleHooks
        from opacus.grad_sample.functorch import prepare_layer
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise ConfigError(
            f"dpsgd needs Opacus ({first_line(error)}): install it with `pip install 'frostglass[dp]'`"
        ) from error

    class SampleGradients(GradSampleHooks):
        """Hooks that leave each picture's gradient in `grad_sample` of every trainable weight, until `cleanup()`.

        Opacus hooks the backward pass of whole layers, which refuses networks that go on in place (ReLU, `x += shortcut`). The gradient
        with respect to the layer's output is the same, and a hook on that tensor allows it.
        """

        def add_hooks(self, **_: Any) -> None:
            layers = list(
                dict.fromkeys(self.iterate_submodules(self._module))
            )  # one that is used twice is hooked once
            for layer in layers:
                if type(layer) not in self.GRAD_SAMPLERS:
                    prepare_layer(layer)  # copies the layer, so it comes before the hooks
            self.autograd_grad_sample_hooks = [
                layer.register_forward_hook(self.watch) for layer in layers
            ]
            self.enable_hooks()

        def watch(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
            if layer.training and torch.is_grad_enabled():
                # Laid out anew: of an input with its channels last in memory, Opacus 1.6 computes wrong gradients for convolutions.
                plain = [
                    part.detach().clone(memory_format=torch.contiguous_format) for part in inputs
                ]
                self.capture_activations_hook(layer, plain, output)
                options = {"loss_reduction": "mean", "batch_first": True}
                output.register_hook(
                    lambda gradient: self.capture_backprops_hook(
                        layer, inputs, (gradient,), **options
                    )
                )

        def cleanup(self) -> None:
            super().cleanup()
            for layer in self._module.modules():
                for trace in ("activations", "max_batch_len"):
                    vars(layer).pop(trace, None)

    class PrivateOptimizer(DPOptimizer):
        """Clip, sum, add noise, divide by the expected batch size, step. Between `step` and `zero_grad` nothing hangs on the network."""

        def __init__(
            self,
            optimizer: torch.optim.Optimizer,
            module: nn.Module,
            *,
            noise: float,
            clip: float,
            batch: int,
        ):
            super().__init__(
                optimizer, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=batch
            )
            self.module = module
            self.attached: list[
                SampleGradients
            ] = []  # a list: Fabric calls zero_grad on a wrapper, where an assignment would be lost

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            while self.attached:
                self.attached.pop().cleanup()
            self.attached.append(SampleGradients(self.module))

        def step(self) -> None:
            if not self.attached:
                raise RunError(
                    "dpsgd: a step without zero_grad before it would use the same pictures twice: call zero_grad first"
                )
            if all(weight.grad_sample is None for weight in self.params):
                if any(weight.grad is not None for weight in self.params):
                    raise RunError(
                        "dpsgd: no picture has a gradient of its own: call zero_grad before the forward pass"
                    )
                for weight in (
                    self.params
                ):  # an empty batch is a step too: the noise must not tell that nobody was in it
                    weight.grad_sample = weight.new_zeros(0, *weight.shape)
            super().step()
            self.attached.pop().cleanup()
            for weight in self.params:
                del weight.summed_grad

    return SampleGradients, PrivateOptimizer


def swapped(layer: Any, norm: str) -> nn.GroupNorm:
    """A norm over groups of channels of one picture with the weights of a batch norm; instance norm is one group a channel."""
    channels = layer.num_features
    groups = channels if norm == "instance" else math.gcd(32, channels)
    made = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine).train(layer.training)
    made.weight, made.bias = layer.weight, layer.bias
    return made


def blind_norms(module: nn.Module, images: Tensor) -> list[str]:
    """Names of group norms with a single value in a group: what they put out is their bias, whatever the picture shows. The module is used up."""
    found: list[str] = []

    def check(name: str) -> Callable[..., None]:
        return lambda layer, inputs: (
            found.append(name) if inputs[0][0].numel() == layer.num_groups else None
        )

    for name, layer in module.named_modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(check(name))
    probe(module, images)
    return found


def refusals(module: nn.Module, images: Tensor) -> list[str]:
    """Why the pictures' gradients cannot be told apart, by trying; the module is used up."""
    module.train()
    images = images.requires_grad_()
    buffers = [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers()]
    with seeded(0, "dpsgd", "trial"):
        try:
            (seen,) = torch.autograd.grad(module(images)[0].sum(), images)
            opacus_classes()[0](module)
            module(images).logsumexp(1).mean().backward()
        except MODEL_ERRORS as error:
            return [f"Opacus cannot follow this network: {first_line(error)}: choose another model"]
    if seen[1:].any():
        return [
            "the logits of one picture depend on the others in its batch, which voids the guarantee: choose another model"
        ]
    if kept := [name for name, buffer, before in buffers if not torch.equal(buffer, before)]:
        return [f"{listed(kept)} keep what the pictures show, without noise: choose another model"]
    trained: dict[str, Any] = {
        name: weight for name, weight in module.named_parameters() if weight.requires_grad
    }
    # Small against the largest gradient anywhere, because some are zero but for rounding, such as that of a bias before a norm.
    slack = 1e-3 * max(
        (float(weight.grad.abs().max()) for weight in trained.values() if weight.grad is not None),
        default=0.0,
    )

    def follows(weight: Any) -> bool:
        each = weight.grad_sample
        return (
            each is not None
            and len(each) == len(images)
            and torch.allclose(each.mean(0), weight.grad, rtol=1e-3, atol=slack)
        )

    if wrong := [name for name, weight in trained.items() if not follows(weight)]:
        return [
            f"gradients of single pictures are missing or do not add up to the batch's at {listed(wrong)}: choose another model"
        ]
    return []


def schedule(records: int, batch: int) -> tuple[int, float]:
    """Steps in an epoch, and the probability with which each picture takes part in each of them."""
    return max(1, round(records / batch)), min(1.0, batch / records)


def epsilon(
    noise: float, rate: float, steps: int, delta: float, accountant: str
) -> tuple[float, str]:
    """The ε spent, and which accountant it is from: rdp also where prv would need too much memory."""
    opacus_classes()
    from opacus.accountants import PRVAccountant, RDPAccountant

    renyi, numeric = RDPAccountant(), PRVAccountant()
    renyi.history = numeric.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Optimal order is the", UserWarning
        )  # the bound holds at any order; it is only less tight
        bound = float(renyi.get_epsilon(delta, alphas=ORDERS))
    return (
        (float(numeric.get_epsilon(delta)), "prv")
        if accountant == "prv" and rate < 1 and bound <= PRV_LIMIT
        else (bound, "rdp")
    )


@defenses.register
@parameters
class Dpsgd(Defense):
    """DP-SGD: no single picture moves the weights by more than a bound, and noise of that size hides whether it was there at all.

    Each step takes every picture with probability q = batch / pictures, and with their gradients g_i over all trained weights uses
    (Σ_i g_i · min(1, S / |g_i|) + N(0, σ² S² I)) / batch. The result is (ε, δ)-private towards adding or removing one training
    picture: a promise about membership. About inversion it promises nothing, and a person with k pictures has only (about) k ε.

    Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, arXiv 1607.00133; Opacus, arXiv 2109.12298.
    Differs: any optimiser follows, not only SGD. The clip factor is Opacus's S / (|g_i| + 1e-6). The noise is repeatable, drawn from the
        run's seed, so the guarantee holds only towards those who do not know the seed; it is not safe against attacks on floating-point
        rounding either. The choice of the epoch reads validation pictures, and losses and accuracies are reported, without noise: ε covers
        the weights and the training pictures. In a step every picture has a gradient of its own: memory grows with batch × weights.

    Args:
        noise: σ, the noise in units of `clip`; 0 clips only and promises nothing. With 27,018 pictures, batches of 64 and 50 epochs 0.5, 1
            and 2 give ε of 16, 2.0 and 0.73. MIBench's 0.01 gives a hundred million.
        clip: S, the largest norm a picture's gradient may have; none leaves gradients alone (then `noise` must be 0).
        delta: δ, the probability with which the promise may fail; below one over the number of pictures.
        norm: what batch norm becomes, because it mixes pictures: "group" with gcd(32, channels) groups, "instance" with a group a channel;
            weights are carried over, running statistics are lost. "keep" changes nothing, and is refused if there is batch norm.
        accountant: "rdp", an upper bound for any noise, or "prv", about a tenth tighter; above ε = 50 prv would need gigabytes, and
            where every picture is in every batch it does not apply: rdp's bound is given (and named) instead. That is why rdp is the default.
    """

    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    norm: Literal["group", "instance", "keep"] = "group"
    accountant: Literal["rdp", "prv"] = "rdp"

    off = {"noise": 0.0, "clip": None, "norm": "keep"}  # noqa: RUF012

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise ValueError(
                f"noise {self.noise} is measured in units of clip: give a clip, or noise 0"
            )

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
                    if type(layer) in PLAIN:
                        setattr(parent, name, swapped(layer, self.norm))
        return target

    def problems(self, target: Target, size: Size) -> list[str]:
        images = noise_images(target.module, target.image_shape, 2)
        if self.norm != "keep" and (blind := blind_norms(deepcopy(target.module), images)):
            other = "another model or larger pictures" if self.norm == "group" else 'norm = "group"'
            return [
                f"the norms {listed(blind)} see one value at a time and would erase it: use {other}"
            ]
        if self.clip is None:
            return []
        if self.delta * size.records >= 1:
            return [
                f"delta must be below one over the {size.records} training pictures, or a picture may simply be published; got {self.delta}"
            ]
        mixing = [
            name for name, layer in target.module.named_modules() if isinstance(layer, _BatchNorm)
        ]
        if mixing:
            remedy = 'use norm = "group"' if self.norm == "keep" else "choose another model"
            return [
                f"BatchNorm layers ({listed(mixing)}) mix the samples of a batch, which voids the guarantee: {remedy}"
            ]
        opacus_classes()
        from opacus.validators import ModuleValidator

        tried = deepcopy(target.module).train()
        return [
            f"Opacus refuses a layer: {first_line(error)}"
            for error in ModuleValidator.validate(tried)
        ] or refusals(tried, images)

    def batches(self, labels: Tensor, size: int, rng: torch.Generator) -> list[Tensor]:
        steps, rate = schedule(len(labels), size)
        return [
            (torch.rand(len(labels), generator=rng, dtype=torch.float64) < rate).nonzero()[:, 0]
            for _ in range(steps)
        ]

    def optimizer(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, size: Size
    ) -> torch.optim.Optimizer:
        if self.clip is None:
            return optimizer
        expected = min(size.records, size.batch)
        return opacus_classes()[1](
            optimizer, module, noise=self.noise, clip=self.clip, batch=expected
        )

    def facts(self, target: Target, size: Size) -> dict[str, Any]:
        if self.clip is None:
            return {}
        steps, rate = schedule(size.records, size.batch)
        spent = {
            "delta": self.delta,
            "noise": self.noise,
            "clip": self.clip,
            "sample_rate": rate,
            "steps": steps * size.epochs,
        }
        if not self.noise:
            return {
                "epsilon": None,
                **spent,
                "accountant": None,
                "note": "without noise there is no guarantee",
            }
        bound, accountant = epsilon(
            self.noise, rate, steps * size.epochs, self.delta, self.accountant
        )
        note = "for the membership of one training picture, not for inversion; holds while the seed stays secret"
        return {"epsilon": bound, **spent, "accountant": accountant, "note": note}
