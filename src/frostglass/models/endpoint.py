"""A classifier behind an HTTP address: images are sent, scores or labels come back."""

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.parameters import parameters

SCHEMES = ("http", "https")
LARGEST = 64 * 2**20  # bytes of an answer
PAUSE = 0.5  # seconds before the first repetition; doubled for each further one
LONGEST_PAUSE = 30.0
BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers after which asking again may help
NEVER = 1e-12  # the probability of every label but the answered one
EXPECTED = 'expected {"scores": [[...], ...]} or {"labels": [...]}'


@parameters
class EndpointSettings:
    """How an endpoint is asked.

    Args:
        batch: images in one request.
        timeout: seconds to wait for an answer.
        retries: how often a request is repeated if it fails, with pauses that grow.
        token: the name of an environment variable whose value is sent as a bearer token.
    """

    batch: Annotated[int, Field(ge=1)] = 32
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    retries: Annotated[int, Field(ge=0, le=20)] = 4
    token: str = ""


class Endpoint(nn.Module):
    """Asks an address about images by POST requests, and returns log-probabilities.

    The request is the JSON object `{"images": [...]}`, with each image as a PNG file in base64. The
    answer is `{"scores": [[...], ...]}`, a list for each image with a number for each class, or
    `{"labels": [...]}`, a number of a class for each image. Scores that sum to 1 are taken for
    probabilities, others for logits. `answered` says what came back first; a change is refused.
    """

    def __init__(self, url: str, classes: int, settings: EndpointSettings) -> None:
        super().__init__()
        self.check(url)
        self.url, self.classes, self.settings = url, classes, settings
        self.answered = ""

    @staticmethod
    def check(url: str) -> None:
        """Refuse an address without a host, or with a password in it."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ConfigError(f"weights: expected an address such as https://host/path, got {url}")
        if parts.password:
            raise ConfigError(
                "weights: the address has a password, which results would show: give the name of "
                "an environment variable as target.endpoint.token"
            )

    def forward(self, images: Tensor) -> Tensor:
        if images.is_meta:  # a dry run asks nobody
            return images.new_zeros(len(images), self.classes)
        parts = [self._ask(part) for part in images.detach().cpu().split(self.settings.batch)]
        return torch.cat(parts).to(images.device)

    def _ask(self, images: Tensor) -> Tensor:
        body = json.dumps({"images": [_png(image) for image in images]}).encode()
        return self._read(self._post(body), len(images))

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", **self._authorisation()}
        request = urllib.request.Request(self.url, body, headers)
        reason = ""
        for attempt in range(self.settings.retries + 1):
            if attempt:
                time.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                with urllib.request.urlopen(request, timeout=self.settings.timeout) as answer:
                    content = answer.read(LARGEST + 1)
                if len(content) > LARGEST:
                    raise RunError(f"{self.url} answered with more than {LARGEST:,} bytes")
                return content
            except urllib.error.HTTPError as error:
                if error.code not in BUSY:
                    raise RunError(
                        f"{self.url} refused a request: {error.code} {error.reason}; check the "
                        "address and target.endpoint.token"
                    ) from error
                reason = f"{error.code} {error.reason}"
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise RunError(
            f"{self.url} gave no answer in {self.settings.retries + 1} attempts of "
            f"{self.settings.timeout:g} s ({reason}): start it, or raise target.endpoint.timeout; "
            "then run the same command again to resume"
        )

    def _authorisation(self) -> dict[str, str]:
        if not self.settings.token:
            return {}
        if not (value := os.environ.get(self.settings.token)):
            raise ConfigError(
                f"target.endpoint.token: no environment variable {self.settings.token}: set it to "
                "the token"
            )
        return {"Authorization": f"Bearer {value}"}

    def _read(self, content: bytes, count: int) -> Tensor:
        try:
            answer = json.loads(content)
            kind = next(name for name in ("scores", "labels") if name in answer)
            values = torch.tensor(answer[kind], dtype=torch.float64)
        except (ValueError, TypeError, StopIteration, RecursionError, OverflowError):
            shown = content[:80].decode(errors="replace")
            raise RunError(f"{self.url} answered {shown!r}: {EXPECTED}") from None
        if self.answered not in ("", kind):
            raise RunError(
                f"{self.url} answered with {kind} after {self.answered}: let it return one of them"
            )
        self.answered = kind
        return self._scores(values, count) if kind == "scores" else self._labels(values, count)

    def _scores(self, values: Tensor, count: int) -> Tensor:
        if values.shape != (count, self.classes) or not values.isfinite().all():
            raise RunError(
                f"{self.url} answered with scores {tuple(values.shape)} for {count} images: "
                f"expected finite numbers ({count}, {self.classes})"
            )
        probabilities = bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())
        return (values.clamp_min(NEVER).log() if probabilities else values).float()

    def _labels(self, values: Tensor, count: int) -> Tensor:
        known: Any = (values >= 0) & (values < self.classes) & (values == values.round())
        if values.shape != (count,) or not known.all():
            raise RunError(
                f"{self.url} answered with labels {tuple(values.shape)} for {count} images: "
                f"expected {count} whole numbers from 0 to {self.classes - 1}"
            )
        chosen = nn.functional.one_hot(values.long(), self.classes)
        return chosen.float().clamp_min(NEVER).log()


def _png(image: Tensor) -> str:
    """Return an image (C, H, W) in [0, 1] as a PNG file in base64; values outside are clamped."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
