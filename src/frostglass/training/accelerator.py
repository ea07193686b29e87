"""What training computes with: Lightning Fabric on a device, in a precision, perhaps compiled."""

import copy
import logging
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.base import MODEL_ERRORS

Precision = Literal["32", "bf16", "16"]
log = logging.getLogger(__name__)


class Accelerator(Protocol):
    """What training asks of a device."""

    def setup(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]: ...
    def to_device(self, tensor: Tensor) -> Tensor: ...
    def backward(self, loss: Tensor) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        """Return a state of its own for a checkpoint."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `tensors` returned."""


class FabricAccelerator:
    """Train with Lightning Fabric, whose state is that of a scaler of half-precision gradients."""

    def __init__(self, device: torch.device, precision: Precision):
        from lightning_fabric import Fabric  # takes seconds
        from lightning_fabric.plugins import MixedPrecision

        mixed = f"{precision}-mixed"
        self._fabric = Fabric(
            accelerator=device.type,
            devices=1 if device.index is None else [device.index],
            # Not by its name, with which Fabric prints a line.
            plugins=None if precision == "32" else MixedPrecision(mixed, device.type),  # type: ignore[arg-type]
        )

    def setup(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return self._fabric.setup(module, optimizer)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._fabric.to_device(tensor)

    def backward(self, loss: Tensor) -> None:
        self._fabric.backward(loss)

    def tensors(self) -> dict[str, Tensor]:
        state = self._fabric.strategy.precision.state_dict()
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        precision = self._fabric.strategy.precision
        kinds = {name: type(value) for name, value in precision.state_dict().items()}
        state = {name: kind(tensors[name].item()) for name, kind in kinds.items()}
        precision.load_state_dict(state)


class MetaAccelerator:
    """Train on the meta device, which Fabric does not support, for dry runs."""

    def setup(self, module: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return module, optimizer

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        pass


def accelerator_for(device: torch.device, precision: Precision = "32") -> Accelerator:
    """Return Fabric on one device; the meta device has its own accelerator."""
    return MetaAccelerator() if device.type == "meta" else FabricAccelerator(device, precision)


def supported_precision(asked: Precision, device: torch.device) -> Precision:
    """Return the precision to train in: single, with a warning, where the device lacks another."""
    if asked == "32" or device.type == "meta":
        return "32"
    if asked == "16":
        supported = device.type == "cuda"
    elif device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        supported = device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if supported:
        return asked
    log.warning(
        "target.precision: this machine has no fast arithmetic of %r on the device %r, so training "
        "is in single precision",
        asked,
        device.type,
    )
    return "32"


def compiled(module: nn.Module, image_shape: Shape, device: torch.device) -> nn.Module | None:
    """Return a compiled form that shares its weights; None, with a warning, where that fails.

    A step of a copy is the trial, so that the network and the random state stay as they are.
    """
    if device.type == "meta":
        return None
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            trial = torch.compile(copy.deepcopy(module).train())
            trial(torch.zeros(2, *image_shape, device=device)).float().sum().backward()
    except (*MODEL_ERRORS, OSError, ImportError) as error:  # of the compilers it starts
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("target.compile: training is not compiled, because that failed: %s", reason)
        return None
    return torch.compile(module)  # type: ignore[return-value]
