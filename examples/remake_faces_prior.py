"""Train an embedded prior again, `faces32` (the default) or `styles32`: about an hour and a half on one core. Stopped and started again, it goes on.

Writes src/frostglass/priors/weights/NAME.safetensors (half precision) and its sample sheet docs/images/NAME.png.
"""

import sys
from pathlib import Path

import torch
from PIL import Image

from frostglass.audit.config import Experiment, read_config
from frostglass.audit.pipeline import PRIOR, SPLIT, fingerprint
from frostglass.cli.progress import Bars
from frostglass.core.prior import Prior
from frostglass.priors._files import write_prior
from frostglass.store.store import Store

ROOT = Path(__file__).parents[1]
CONFIGS = {"faces32": "prior.toml", "styles32": "styles.toml"}


def sheet(prior: Prior, rows: int = 6, columns: int = 16) -> Image.Image:
    """Random samples side by side, doubled in size."""
    latents = torch.randn(rows * columns, prior.latent, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pictures = prior.images(latents).unflatten(0, (rows, columns))
    page = pictures.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    image = Image.fromarray(page.mul(255).round().byte().numpy())
    return image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)


def main(name: str) -> None:
    torch.set_num_threads(1)  # the last bits of the result depend on the number of threads
    exp = Experiment.parse(read_config(ROOT / "configs" / "faces" / CONFIGS[name]))
    with Bars() as bars:
        store = Store(".frostglass", listener=bars)
        split = store.step(SPLIT, exp.data, exp.split, fingerprint(exp.data), seed=exp.seed)
        prior = store.step(
            PRIOR, exp.prior, split.public, None, fingerprint(exp.prior), seed=exp.seed
        )
    write_prior(
        prior,
        ROOT / "src" / "frostglass" / "priors" / "weights" / f"{name}.safetensors",
        torch.float16,
    )
    (ROOT / "docs" / "images").mkdir(parents=True, exist_ok=True)
    sheet(prior).save(ROOT / "docs" / "images" / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "faces32")
