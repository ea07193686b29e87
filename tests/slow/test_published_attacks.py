"""Every attack of the published configs at full size: one step of its prior and one of its search, on a few random pictures."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frostglass.attacks.base import invert
from frostglass.audit.config import Experiment, experiments, read_config
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target
from frostglass.core.views import ModelView
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import KIND
from frostglass.plan.memory import most_resident
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import seeded
from frostglass.store.files import write_tensors
from frostglass.training.build import untrained

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "configs"
# Configs that have every attack of the papers, on each kind of network, and the classes of their data.
CLASSES = {
    "mnist/mcnn-bido": 5, "cifar10/vgg16-bido": 5, "celeba/vgg16-tl": 1000, "celeba/resnet34-vmi": 1000, "facescrub/ir152-calor": 530,
    "facescrub/resnet18-tl": 530, "facescrub/resnet152-msceleb": 530, "facescrub/maxvit-tl": 530, "dogs/resnest101-tl": 120,
    "vggface2/resnet50-tl": 8631,
}  # fmt: skip
PUBLIC = 32  # the conditional prior asks for 30
MOST = 16 * 2**30  # bytes of memory that a step may take

# NVIDIA's networks by the files that configs read. A picture of the largest takes a core seconds, and every step makes 16, so only one config has it
# as wide as it is; in the others an eighth of its channels stands in, which has all of its blocks and pixels.
STYLES = {
    "ffhq.safetensors": StyleSettings(resolution=1024),
    "afhqdog.safetensors": StyleSettings(resolution=512),
    "ffhq256.safetensors": StyleSettings(resolution=256, channel_base=16384),
}
IN_FULL_WIDTH = "facescrub/resnet18-tl"


def undefended(config: str) -> dict[str, Experiment]:
    """The experiments of a config without defenses, by the name of their attack."""
    made = experiments(read_config(ROOT / f"{config}.toml"))
    return {
        experiment.case or experiment.attack.name: experiment
        for _, experiment in made
        if not experiment.defenses
    }


def random_pictures(shape: tuple[int, int, int]) -> Images:
    """Noise around a colour of each picture's own."""
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


def random_target(experiment: Experiment, classes: int, pictures: Tensor) -> Target:
    """The config's network with random weights, its head turned so that it says different things of the pictures: priors refuse one that does not."""
    made = untrained(
        experiment.target, tuple(map(str, range(classes))), experiment.data.image_shape, (), seed=0
    )
    head = made.module.get_submodule(made.head)
    with frozen(made.module), torch.no_grad():
        features = made.outputs(pictures)[1]
        head.weight.mul_(4 / ((features - features.mean(0)) @ head.weight.T).std())
        if head.bias is not None:  # MaxViT's head has none
            head.bias.copy_(-(head.weight @ features.mean(0)))
    return replace(made, key="target")


def one_step(experiment: Experiment) -> Experiment:
    """The experiment with a prior and a search of one step each; all else as in the config, but for files that do not ship."""
    prior, attack = experiment.prior, experiment.attack
    if prior.name == "stylegan2" and prior.weights:
        pass  # nothing is trained
    elif prior.name == "stylegan2":
        prior = replace(prior, steps=1, batch=8)
    elif prior.name == "students":
        fresh = tuple({"model": student["model"]} for student in prior.students)
        prior = replace(prior, epochs=1, students=fresh, base={**prior.base, "steps": 1})
    else:
        prior = replace(prior, steps=1)
    if attack.name == "brepmi":
        attack = replace(attack, budget=(attack.points + 2) * attack.samples, tries=256)
    else:
        attack = replace(attack, steps=1, candidates=1, keep=attack.read_from_each)
    if attack.name in ("ppa", "mirror", "ifgmi"):
        attack = replace(attack, pool=4)
    if attack.name == "ppa":
        attack = replace(attack, trials=1)
    if attack.name == "ifgmi":  # one at the last block too
        attack = replace(attack, block_steps=(*(0 for _ in attack.block_steps[1:]), 1))
    return replace(experiment, prior=prior, attack=attack)


def with_random_styles(experiment: Experiment, config: str, folder: Path) -> Experiment:
    """The experiment with a converted file of random weights in place of NVIDIA's, where it reads one."""
    name = getattr(experiment.prior, "weights", None)
    if not name:
        return experiment
    made = (
        STYLES[name]
        if config == IN_FULL_WIDTH
        else replace(STYLES[name], channel_base=STYLES[name].channel_base // 8)
    )
    with seeded(0, "tests"):
        network = StyleGenerator(made)
    write_tensors(folder / name, network.state_dict(), {KIND: asdict(made)})
    return replace(experiment, prior=replace(experiment.prior, weights=str(folder / name)))


def two_people(experiment: Experiment, view: ModelView, prior: Prior) -> list[int]:
    """Whom to attack: the first two, or for an attack that has to meet a person first, one of whom the prior makes pictures, and another."""
    if experiment.attack.name != "brepmi":
        return [0, 1]
    with frozen(view.module, *prior.modules), torch.no_grad():
        met = (
            view.labels(
                prior.images(
                    torch.randn(64, prior.latent, generator=torch.Generator().manual_seed(0))
                )
            )
            .mode()
            .values.item()
        )
    return [met, (met + 1) % view.classes]


@pytest.mark.parametrize(
    ("config", "case"), [(config, case) for config in CLASSES for case in undefended(config)]
)
def test_a_published_attack_takes_its_first_step(config, case, tmp_path):
    experiment = with_random_styles(one_step(undefended(config)[case]), config, tmp_path)
    shape, attack = experiment.data.image_shape, experiment.attack
    public = random_pictures(shape)
    view = random_target(experiment, CLASSES[config], public.floats()).view(attack.access)

    prior = experiment.prior.train(public, view if experiment.prior.tied else None, seed=0)
    assert prior.image_shape == shape
    assert len(prior.students) == (3 if attack.name == "lomma" else 0)
    assert all(
        weight.isfinite().all() for module in prior.modules for weight in module.parameters()
    )

    people = two_people(experiment, view, prior)
    found = invert(attack, view, prior, labels=people, seed=0)
    assert found.labels.tolist() == people
    assert found.images.shape == (2, attack.keep, *shape)
    assert found.images.isfinite().all()
    assert 0 <= found.images.min() < found.images.max() <= 1
    assert found.latents.isfinite().all()
    searched = (
        [True, False] if attack.name == "brepmi" else [True, True]
    )  # a person who is never met has no walk
    taken = 2 if attack.name == "ifgmi" else 1
    assert [bool((steps == taken).all()) for steps in found.steps] == searched
    assert (~found.partial).tolist() == searched
    assert most_resident() <= MOST
