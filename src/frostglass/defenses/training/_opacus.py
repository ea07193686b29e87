"""Opacus's per-sample gradients and its optimiser, adapted to the training loop."""

from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import prepare_layer
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from frostglass.core.errors import RunError


class SampleGradients(GradSampleHooks):
    """Hooks that store each image's gradient in `grad_sample` of every trainable weight.

    Opacus hooks the backward pass of whole layers, which fails for networks that continue in place
    (ReLU, `x += shortcut`). A hook on the layer's output tensor sees the same gradient. `cleanup`
    removes the hooks.
    """

    def add_hooks(self, **_: Any) -> None:
        # A layer that is used twice is hooked once.
        layers = list(dict.fromkeys(self.iterate_submodules(self._module)))
        for layer in layers:
            if type(layer) not in self.GRAD_SAMPLERS:
                prepare_layer(layer)  # copies the layer, so it comes before the hooks
        self.autograd_grad_sample_hooks = [
            layer.register_forward_hook(self.watch) for layer in layers
        ]
        self.enable_hooks()

    def watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not (layer.training and torch.is_grad_enabled()):
            return
        # Contiguous: Opacus 1.6 computes wrong gradients for channels-last convolution inputs.
        contiguous = [part.detach().clone(memory_format=torch.contiguous_format) for part in inputs]
        self.capture_activations_hook(layer, contiguous, output)
        options = {"loss_reduction": "mean", "batch_first": True}
        output.register_hook(
            lambda gradient: self.capture_backprops_hook(layer, inputs, (gradient,), **options)
        )

    def cleanup(self) -> None:
        super().cleanup()
        for layer in self._module.modules():
            for trace in ("activations", "max_batch_len"):
                vars(layer).pop(trace, None)


class PrivateOptimizer(DPOptimizer):
    """Clip, sum, add noise, divide by the expected batch size, step.

    Between `step` and `zero_grad` no hook is attached to the network.
    """

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
        # A list, because Fabric calls zero_grad on a wrapper, which would lose an assignment.
        self.attached: list[SampleGradients] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        while self.attached:
            self.attached.pop().cleanup()
        self.attached.append(SampleGradients(self.module))

    def step(self) -> None:
        if not self.attached:
            raise RunError(
                "dpsgd: a step without zero_grad before it would use the same images twice: "
                "call zero_grad first"
            )
        if all(weight.grad_sample is None for weight in self.params):
            if any(weight.grad is not None for weight in self.params):
                raise RunError(
                    "dpsgd: there are no per-sample gradients: "
                    "call zero_grad before the forward pass"
                )
            # An empty batch is a step too: the noise must hide that it was empty.
            for weight in self.params:
                weight.grad_sample = weight.new_zeros(0, *weight.shape)
        super().step()
        self.attached.pop().cleanup()
        for weight in self.params:
            del weight.summed_grad
