"""Views grant, refuse and count."""

import pytest
import torch

from frostglass.errors import AccessError, ConfigError, DataError
from frostglass.runtime import capture, frozen, generator_for, seed_for
from frostglass.types import Images
from worlds import target

PICTURES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
USES = {
    "labels": lambda view: view.labels(PICTURES),
    "scores": lambda view: view.scores(PICTURES),
    "gradients": lambda view: view.logits(PICTURES),
}


@pytest.mark.parametrize(("granted", "allowed"), [("labels", {"labels"}), ("scores", {"labels", "scores"}), ("gradients", set(USES))])
def test_what_is_granted_works_and_nothing_else(granted, allowed):
    view = target().view([granted])
    for name, use in USES.items():
        if name in allowed:
            use(view)
        else:
            with pytest.raises(AccessError, match=f"grants {granted} and not {name}: ask for it"):
                use(view)
    assert view.queries == 3 * len(allowed)


def test_unknown_or_no_access_is_refused():
    with pytest.raises(ConfigError, match="access must name some of labels, scores, gradients; got weights"):
        target().view(["weights"])
    with pytest.raises(ConfigError, match="got nothing"):
        target().view([])


def test_scores_carry_no_gradient_and_logits_do():
    pictures = PICTURES.clone().requires_grad_()
    view = target().view(["gradients"])
    assert not view.scores(pictures).requires_grad
    view.logits(pictures).sum().backward()
    assert pictures.grad.abs().sum() > 0


def test_pictures_of_another_size_or_colour_are_fitted():
    view = target().view(["gradients"])
    with frozen(view.module):
        assert view.logits(torch.rand(2, 1, 24, 24)).shape == (2, 4)
        grey = torch.rand(2, 1, 16, 16)
        assert torch.equal(view.logits(grey), view.logits(grey.expand(-1, 3, -1, -1)))


def test_frozen_restores_everything_also_buffers_and_after_an_exception():
    module = target().module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def disturb():
        with frozen(module):
            assert not any(p.requires_grad for p in module.parameters())
            module[1].running_mean.add_(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        disturb()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_capture_removes_its_hooks():
    module = target().module
    with capture(module, ("0", "2")) as seen:
        module(PICTURES)
    assert set(seen) == {"0", "2"}
    assert not module[0]._forward_hooks


def test_seeds_are_derived_by_path():
    assert seed_for(0, "a", 1) == seed_for(0, "a", 1)
    assert (
        len({seed_for(0, "a", 1), seed_for(1, "a", 1), seed_for(0, "a", 2), seed_for(0, "a/1"), seed_for(0, "b", 1)}) == 4
    )  # a path is its text
    assert generator_for(0, "x").initial_seed() == seed_for(0, "x")


def test_images_refuse_what_is_not_bytes():
    with pytest.raises(DataError, match="expected uint8 pixels of shape"):
        Images(pixels=torch.zeros(1, 3, 4, 4), labels=torch.zeros(1), names=("a",), sources=("a",))
    with pytest.raises(DataError, match="1 pictures, 2 labels and 1 sources"):
        Images(pixels=torch.zeros(1, 3, 4, 4, dtype=torch.uint8), labels=torch.zeros(2), names=("a",), sources=("a",))


@pytest.mark.parametrize("samples", [0, -1, 1.5, None])
def test_samples_must_be_a_count(samples):
    with pytest.raises(ConfigError, match="samples must be a whole number of at least 1"):
        target().view("scores").averaged(samples)
