"""Each attack of the published configs at full size: one step of prior and search."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frostglass.attacks.base import invert
from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import Experiment, experiments
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target
from frostglass.core.views import ModelView
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import KIND
from frostglass.runtime.freezing import frozen
from frostglass.runtime.memory import most_resident
from frostglass.runtime.seeding import seeded
from frostglass.store.files import write_tensors
from frostglass.training.build import untrained

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "configs"
# Configs with every attack of the papers, on each kind of network, and the classes of their data.
CLASSES = {
    "mnist/mcnn-bido": 5,
    "cifar10/vgg16-bido": 5,
    "celeba/vgg16-tl": 1000,
    "celeba/resnet34-vmi": 1000,
    "facescrub/ir152-calor": 530,
    "facescrub/resnet18-tl": 530,
    "facescrub/resnet152-msceleb": 530,
    "facescrub/maxvit-tl": 530,
    "dogs/resnest101-tl": 120,
    "vggface2/resnet50-tl": 8631,
}
PUBLIC = 32  # the conditional prior asks for 30
MOST = 16 * 2**30  # bytes of memory that a step may take

# NVIDIA's networks by the files that configs read. One core needs seconds for an image of the
# largest, and each step generates 16. So only one config has full width; the others have an eighth
# of the channels, with all blocks and pixels.
STYLES = {
    "ffhq.safetensors": StyleSettings(resolution=1024),
    "afhqdog.safetensors": StyleSettings(resolution=512),
    "ffhq256.safetensors": StyleSettings(resolution=256, channel_base=16384),
}
IN_FULL_WIDTH = "facescrub/resnet18-tl"


def undefended(config: str) -> dict[str, Experiment]:
    """Return the undefended experiments of a config, by the name of their attack."""
    return {
        experiment.case or experiment.attack.name: experiment
        for _, experiment in experiments(read_config(ROOT / f"{config}.toml"))
        if not experiment.defenses
    }


def random_images(shape: tuple[int, int, int]) -> Images:
    """Return noise around a random colour for each image."""
    rng = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 192, (PUBLIC, shape[0], 1, 1), generator=rng, dtype=torch.uint8)
    pixels = colours + torch.randint(0, 64, (PUBLIC, *shape), generator=rng, dtype=torch.uint8)
    return Images(
        pixels,
        torch.zeros(PUBLIC, dtype=torch.long),
        ("stranger",),
        tuple(map(str, range(PUBLIC))),
        key="public",
    )


def random_target(experiment: Experiment, classes: int, images: Tensor) -> Target:
    """Return the config's network with random weights, scaled so that its outputs differ."""
    names, shape = tuple(map(str, range(classes))), experiment.data.image_shape
    target = untrained(experiment.target, names, shape, (), seed=0)
    head = target.module.get_submodule(target.head)
    with frozen(target.module), torch.no_grad():
        features = target.outputs(images)[1]
        head.weight.mul_(4 / ((features - features.mean(0)) @ head.weight.T).std())
        if head.bias is not None:  # MaxViT's head has none
            head.bias.copy_(-(head.weight @ features.mean(0)))
    return replace(target, key="target")


def one_step(experiment: Experiment) -> Experiment:
    """Cut prior and search to one step, and drop files that do not ship."""
    prior, attack = experiment.prior, experiment.attack
    if prior.name == "stylegan2" and prior.weights:
        pass  # it is not trained
    elif prior.name == "stylegan2":
        prior = replace(prior, steps=1, batch=8)
    elif prior.name == "students":
        fresh = tuple({"model": student["model"]} for student in prior.students)
        prior = replace(prior, epochs=1, students=fresh, base={**prior.base, "steps": 1})
    else:
        prior = replace(prior, steps=1)
    if attack.name == "brepmi":
        attack = replace(attack, max_queries=(attack.points + 2) * attack.samples, tries=256)
    else:
        attack = replace(attack, steps=1, candidates=1, keep=attack.reads)
    if attack.name in ("ppa", "mirror", "ifgmi"):
        attack = replace(attack, pool=4)
    if attack.name == "ppa":
        attack = replace(attack, trials=1)
    if attack.name == "ifgmi":  # one at the last block too
        attack = replace(attack, block_steps=(*(0 for _ in attack.block_steps[1:]), 1))
    return replace(experiment, prior=prior, attack=attack)


def with_random_styles(experiment: Experiment, config: str, folder: Path) -> Experiment:
    """Use random weights in place of NVIDIA's, if the experiment reads a file."""
    name = getattr(experiment.prior, "weights", None)
    if not name:
        return experiment
    settings = STYLES[name]
    if config != IN_FULL_WIDTH:
        settings = replace(settings, channel_base=settings.channel_base // 8)
    with seeded(0, "tests"):
        network = StyleGenerator(settings)
    write_tensors(folder / name, network.state_dict(), {KIND: asdict(settings)})
    return replace(experiment, prior=replace(experiment.prior, weights=str(folder / name)))


def two_people(experiment: Experiment, view: ModelView, prior: Prior) -> list[int]:
    """Return the first two people; for BREP-MI one whom the prior generates, and another."""
    if experiment.attack.name != "brepmi":
        return [0, 1]
    latents = torch.randn(64, prior.latent, generator=torch.Generator().manual_seed(0))
    with frozen(view.module, *prior.modules), torch.no_grad():
        generated = view.labels(prior.images(latents)).mode().values.item()
    return [generated, (generated + 1) % view.classes]


@pytest.mark.parametrize(
    ("config", "case"), [(config, case) for config in CLASSES for case in undefended(config)]
)
def test_a_published_attack_takes_its_first_step(config, case, tmp_path):
    experiment = with_random_styles(one_step(undefended(config)[case]), config, tmp_path)
    shape, attack = experiment.data.image_shape, experiment.attack
    public = random_images(shape)
    view = random_target(experiment, CLASSES[config], public.floats()).view(attack.access)

    prior = experiment.prior.train(public, view if experiment.prior.tied else None, seed=0)
    assert prior.image_shape == shape
    assert len(prior.students) == (3 if attack.name == "lomma" else 0)
    assert all(
        weight.isfinite().all() for module in prior.modules for weight in module.parameters()
    )

    people = two_people(experiment, view, prior)
    result = invert(attack, view, Assets(prior=prior), people=people, seed=0)
    assert result.labels.tolist() == people
    assert result.images.shape == (2, attack.keep, *shape)
    assert result.images.isfinite().all()
    assert 0 <= result.images.min() < result.images.max() <= 1
    assert result.latents.isfinite().all()
    # BREP-MI has no start for the second person.
    searched = [True, False] if attack.name == "brepmi" else [True, True]
    taken = 2 if attack.name == "ifgmi" else 1
    assert [bool((steps == taken).all()) for steps in result.steps] == searched
    assert (~result.partial).tolist() == searched
    assert most_resident() <= MOST
