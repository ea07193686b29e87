"""A trained amortizer: the network with the settings it takes to build it again."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from frostglass.core.errors import CheckpointError
from frostglass.core.limits import within_file
from frostglass.models.base import MODEL_ERRORS, first_line
from frostglass.networks.amortizer import Amortizer
from frostglass.runtime.device import default_device
from frostglass.store.files import read_tensors, write_tensors

AMORTIZER = "amortizer.safetensors"


@dataclass(init=False, eq=False, repr=False)
class TrainedAmortizer(nn.Module):
    """Predicts the latents (N, latent) behind features (N, *feature_shape) of one encoder."""

    network: nn.Module
    config: Amortizer
    feature_shape: tuple[int, ...]
    latent: int
    key: str = ""

    def __init__(
        self,
        network: nn.Module,
        config: Amortizer,
        feature_shape: tuple[int, ...],
        latent: int,
        key: str = "",
    ):
        super().__init__()
        self.network, self.config, self.key = network, config, key
        self.feature_shape, self.latent = feature_shape, latent

    def forward(self, features: Tensor) -> Tensor:
        return self.network(features)

    def save(self, folder: Path) -> None:
        about = {
            "config": asdict(self.config),
            "feature_shape": list(self.feature_shape),
            "latent": self.latent,
        }
        write_tensors(folder / AMORTIZER, self.network.state_dict(), about)

    @classmethod
    def load(cls, folder: Path, device: torch.device | None = None) -> "TrainedAmortizer":
        path = folder / AMORTIZER
        tensors, about = read_tensors(path)
        try:
            with within_file(path, [tensor.shape for tensor in tensors.values()]):
                config, shape = Amortizer(**about["config"]), tuple(about["feature_shape"])
                network = config.network(shape, about["latent"])
            network.load_state_dict(tensors)
        except CheckpointError:
            raise
        except (*MODEL_ERRORS, OverflowError) as error:
            raise CheckpointError(
                f"{path} does not describe its network ({first_line(error)}): it was changed. "
                "Save it again."
            ) from error
        return cls(network.eval().to(device or default_device()), config, shape, about["latent"])
