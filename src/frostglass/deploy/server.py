"""The server's half of a split model."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.types import Shape
from frostglass.deploy._facts import ServerFacts
from frostglass.deploy._files import (
    CHUNK,
    load_weights,
    match_weights,
    new_folder,
    read_facts,
    rebuild_halves,
    save_half,
    shape_of,
)
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded


@dataclass(frozen=True)
class Server:
    """The server's half: `answer(features)` returns the logits of `classes`, or of attributes."""

    rest: nn.Module
    classes: tuple[str, ...]
    image_shape: Shape
    feature_shape: tuple[int, ...]
    cut: str
    attributes: bool = False
    recipe: Mapping[str, Any] | None = None

    def answer(self, features: Tensor) -> Tensor:
        """Return logits (N, K) for features (N, ...)."""
        self._check(features)
        with frozen(self.rest), torch.no_grad():
            return torch.cat(
                [self.rest(match_weights(part, self.rest)) for part in features.split(CHUNK)]
            )

    def retrained(
        self,
        features: Tensor,
        answers: Tensor,
        *,
        epochs: int = 20,
        batch: int = 64,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> "Server":
        """Return a copy of this server trained on released features (N, ...).

        `answers` are labels (N,), or attributes (N, K) of 0.0 and 1.0. So a service can be trained
        on data of people who never send a plain feature.
        """
        self._check(features)
        self._check_answers(features, answers)
        if not list(self.rest.parameters()):
            raise ConfigError(
                f"this server has nothing to train: nothing comes after {self.cut!r}, where "
                "features leave; cut at an earlier layer"
            )
        answers = answers.float() if self.attributes else answers.long()
        rest = copy.deepcopy(self.rest).train()
        device = device_of(rest)
        optimizer = torch.optim.AdamW(rest.parameters(), lr=lr)
        loss_of = F.cross_entropy if answers.ndim == 1 else F.binary_cross_entropy_with_logits
        batches = max(1, len(features) // batch)
        with seeded(seed, "retrain"):  # dropout inside the network
            for epoch in range(epochs):
                rng = generator_for(seed, "retrain", epoch)
                order = torch.randperm(len(features), generator=rng)
                for index in order.tensor_split(batches):
                    loss = loss_of(rest(features[index].to(device)), answers[index].to(device))
                    if not loss.isfinite():
                        raise RunError(f"the loss is not finite in epoch {epoch}. Lower lr.")
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
        return replace(self, rest=rest.eval())

    def save(self, folder: Path | str) -> Path:
        """Write the server into a new folder: facts.json and safetensors, nothing else."""
        facts = {
            "kind": "server",
            "classes": self.classes,
            "image_shape": self.image_shape,
            "feature_shape": self.feature_shape,
            "cut": self.cut,
            "attributes": self.attributes,
            "recipe": self.recipe,
        }
        return save_half(new_folder(folder), self.rest, facts)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        module: nn.Module | None = None,
        *,
        device: torch.device | None = None,
    ) -> "Server":
        """Load what `save` wrote; for a network of your own, pass the whole network as `module`."""
        folder = Path(folder)
        facts = read_facts(folder, "server", ServerFacts)
        rest = rebuild_halves(facts, folder, module).rest
        load_weights(rest, folder)
        return cls(
            rest.to(device or default_device()),
            tuple(facts.classes),
            shape_of(facts),
            tuple(facts.feature_shape),
            facts.cut,
            facts.attributes,
            facts.plain_recipe,
        )

    def _check(self, features: Tensor) -> None:
        if tuple(features.shape[1:]) != tuple(self.feature_shape):
            expected = ", ".join(map(str, self.feature_shape))
            raise ConfigError(
                f"expected features of shape (N, {expected}), got {tuple(features.shape)}: they "
                "come from another model, or from another cut of it"
            )
        if not features.isfinite().all():
            raise ConfigError("expected finite features, got NaN or infinity. Release them again.")

    def _check_answers(self, features: Tensor, answers: Tensor) -> None:
        if len(features) != len(answers) or len(features) < 2:
            raise ConfigError(
                f"expected as many features as answers, at least 2, got {len(features)} and "
                f"{len(answers)}"
            )
        columns = (len(self.classes),) if self.attributes else ()
        if answers.shape[1:] != columns:
            expected = f"(N, {len(self.classes)}) of 0 and 1" if columns else "(N,) of classes"
            raise ConfigError(
                f"expected answers {expected}, got {answers.dtype} {tuple(answers.shape)}"
            )
