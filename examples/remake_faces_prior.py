"""Train an embedded prior again, `faces32` (default) or `styles32`: 90 minutes on one core.

A stopped training resumes. Writes src/frostglass/priors/weights/NAME.safetensors (half precision)
and its sample sheet docs/images/NAME.png. With `critic` as a second word only the last part of
the training of `faces32` is repeated, on the weights there are: the steps of the critic alone.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.auditing.networks import trained_prior
from frostglass.auditing.steps import SPLIT
from frostglass.cli.progress import Bars
from frostglass.core.display import image_grid
from frostglass.core.prior import Prior
from frostglass.core.types import Images
from frostglass.priors._files import read_prior, write_prior
from frostglass.priors.wgan import Wgan, WganTraining
from frostglass.store.files import Work
from frostglass.store.keys import fingerprint
from frostglass.store.store import Store

ROOT = Path(__file__).parents[1]
CONFIGS = {"faces32": "prior.toml", "styles32": "styles.toml"}


def sheet(prior: Prior, rows: int = 6, columns: int = 16) -> Image.Image:
    """Return random samples side by side, doubled in size."""
    latents = torch.randn(rows * columns, prior.latent, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        image = image_grid(prior.images(latents), columns)
    return image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)


def settled(prior: Prior, method: Wgan, public: Images, seed: int) -> Prior:
    """Return the prior with its critic settled as `method` says; the generator stays."""
    training = WganTraining(method, public, None, seed, torch.device("cpu"))
    prior = training.finish(prior, Work.scratch())
    return replace(prior, info={**prior.info, "method": method.record()})


def main(name: str, part: str = "all") -> None:
    torch.set_num_threads(1)  # the last bits of the result depend on the number of threads
    path = ROOT / "src" / "frostglass" / "priors" / "weights" / f"{name}.safetensors"
    [(_, exp)] = experiments(read_config(ROOT / "configs" / "faces" / CONFIGS[name]))
    with Bars() as bars:
        store = Store(".frostglass", listener=bars)
        files = fingerprint(exp.data)
        split = store.step(SPLIT, exp.data, fractions=exp.split, files=files, seed=exp.seed)
        if part == "critic":
            prior = settled(read_prior(path), exp.prior, split.public, exp.seed)
        else:
            prior = trained_prior(store, exp.prior, split, None, seed=exp.seed)
    write_prior(prior, path, torch.float16)
    (ROOT / "docs" / "images").mkdir(parents=True, exist_ok=True)
    sheet(prior).save(ROOT / "docs" / "images" / f"{name}.png")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["faces32"]))
