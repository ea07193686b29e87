"""The contract of prior methods: untrained priors, brief copies, budgets, and stored networks."""

from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import CheckpointError, ConfigError
from frostglass.core.method import AuditSize
from frostglass.core.prior import Prior
from frostglass.priors import read_prior
from frostglass.priors._files import write_prior
from frostglass.priors.base import PriorMethod, priors
from worlds import PUBLIC, SHAPE, NoWork, target

GAN = {"latent": 5, "width": 4, "steps": 6, "critic_steps": 2, "batch": 8}
STYLES = {"latent": 6, "style": 5, "channel_base": 64, "channel_max": 8, "steps": 6, "batch": 8}
STUDENTS = {
    "base": {"name": "wgan", **GAN},
    "students": ({"model": "cnn", "options": {"width": 4}},),
    "epochs": 3,
    "batch": 8,
    "statistics": 20,
}
SURROGATES = {key: value for key, value in STUDENTS.items() if key != "statistics"}
METHODS = [
    priors.get(name)(**values)
    for name, values in (
        ("wgan", GAN),
        ("wgan", {**GAN, "diversity": 0.5}),
        ("kplus1", {**GAN, "kernels": 3, "kernel_size": 2}),
        ("conditional", {**GAN, "top": 4}),
        ("context", GAN),
        ("stylegan2", {**STYLES, "path": 2.0}),
        ("students", STUDENTS),
        ("tacgan", {**GAN, "warmup": 2}),
        ("tacgan", {**GAN, "warmup": 2, "network": "dcgan"}),
        ("surrogates", {**SURROGATES, "per_class": 5}),
        ("experts", {**SURROGATES, "draws": 30}),
        ("pretrained", {"weights": "faces32", "resize": True}),
    )
]
TRAINED = [method for method in METHODS if not method.ready]


def by_name(method: PriorMethod) -> str:
    return method.name


def trained(method: PriorMethod, **options) -> Prior:
    view = target().view(["gradients"]) if method.tied else None
    return method.train(PUBLIC, view, work=NoWork(), **options)


def shapes(prior: Prior) -> list[dict[str, torch.Size]]:
    return [{k: t.shape for k, t in m.state_dict().items()} for m in prior.modules]


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_an_untrained_prior_has_the_networks_of_a_trained_one(method):
    before, after = method.untrained(SHAPE, 4), trained(method)
    assert shapes(before) == shapes(after)
    assert (before.critic is None) == (after.critic is None)
    assert (before.features is None) == (after.features is None)
    for fact in ("latent", "image_shape", "classes", "condition", "blocks"):
        assert getattr(before, fact) == getattr(after, fact)
    assert before.info.keys() <= after.info.keys()
    assert before.tied_to is None
    assert not any(module.training for module in before.modules)


@pytest.mark.parametrize("method", TRAINED, ids=by_name)
def test_an_untrained_prior_can_be_built_without_memory(method):
    with torch.device("meta"):
        prior = method.untrained(SHAPE, 4)
    tensors = [t for module in prior.modules for t in module.state_dict().values()]
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("method", METHODS, ids=by_name)
def test_networks_are_on_the_device_that_was_given(method, monkeypatch):
    monkeypatch.setenv("FROSTGLASS_DEVICE", "cuda:7")  # using the default would fail
    prior = trained(method.brief(), device=torch.device("cpu"))
    tensors = [t for module in prior.modules for t in module.state_dict().values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@pytest.mark.parametrize("method", TRAINED, ids=by_name)
def test_a_brief_copy_has_the_same_networks_and_less_to_do(method):
    size = AuditSize(people=4, public=40, classes=4)
    brief = method.brief()
    assert 0 < brief.budget(size).trained < method.budget(size).trained
    assert shapes(brief.untrained(SHAPE, 4)) == shapes(method.untrained(SHAPE, 4))
    assert brief.brief() == brief


@pytest.mark.parametrize("method", TRAINED, ids=by_name)
def test_the_budget_counts_what_the_target_is_shown(method):
    size = AuditSize(people=4, public=40, classes=4)
    for chosen in (method, method.brief()):
        view = target().view(["gradients"])
        chosen.train(PUBLIC, view, work=NoWork())
        assert chosen.budget(size).evaluations == view.queries


def test_budgets_say_how_much_is_trained():
    size = AuditSize(people=4, public=40, classes=4)
    budgets = {method.name: method.budget(size) for method in METHODS}
    assert budgets["kplus1"].description == "6 steps of 2 × 8 images"
    assert budgets["kplus1"].trained == 6 * 2 * 8
    assert budgets["stylegan2"].trained == 6 * 8
    assert budgets["students"].description == "1 students × 3 epochs × 40 images"
    assert budgets["students"].trained == 3 * 40
    assert (budgets["pretrained"].description, budgets["pretrained"].images) == ("load weights", 0)


def test_problems_name_too_few_public_images():
    conditional = next(method for method in METHODS if method.name == "conditional")
    assert conditional.problems(4) == []
    problem = "conditional.top (4) is more than the 3 public images there are: lower it"
    assert conditional.problems(3) == [problem]
    base = {"name": "conditional", **GAN, "top": 4}
    assert replace(METHODS[6], base=base).problems(3) == [problem]


def test_priors_that_cannot_be_built_are_refused():
    wgan, styles = METHODS[0], METHODS[5]
    with pytest.raises(ConfigError, match="16, 32, 64 or 128 pixels"):
        wgan.untrained((3, 40, 40), 4)
    with pytest.raises(ConfigError, match="are for weights from a file"):
        replace(styles, crop=8).untrained(SHAPE, 4)
    with pytest.raises(CheckpointError, match=r"the data has 16×16: set prior\.resize"):
        priors.get("pretrained")().untrained(SHAPE, 4)


@pytest.mark.parametrize("name", ["this_would_run:Method", "pretrained"])
def test_a_file_must_record_a_built_in_method(name, tmp_path):
    prior = METHODS[0].untrained(SHAPE, 4)
    method = {"name": name, "parameters": {}}
    write_prior(replace(prior, info={"method": method}), tmp_path / "p.safetensors")
    message = "names code to run .this_would_run:Method" if ":" in name else "must record"
    with pytest.raises(CheckpointError, match=message):
        read_prior(tmp_path / "p.safetensors")


def test_a_class_without_its_methods_cannot_be_registered():
    class Half(PriorMethod):
        """Lacks `untrained`."""

        def fit(self, task):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="prior Half lacks untrained: define each of them"):
        priors.register(Half, "half")
