"""Trap-MID: the triggers, the discriminator, the loss, and that trapdoors work."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from frostglass.core.errors import ConfigError
from frostglass.defenses.base import Batch, TrainingProgress, TrainingSize
from frostglass.defenses.training._trapdoors import blended
from frostglass.defenses.training.trap_mid import TrapMid
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork, images, same_weights, split, target

CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3)
FIRST = TrainingProgress(0, 4)
STRANGERS = images(40, 5, seed=9, names="stranger")


def trapdoors(model=None, **more):
    return TrapMid(**more).opponent(model or target(), STRANGERS, None, seed=0)


def copy_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_the_published_setting_is_the_default():
    defense = TrapMid()
    assert (defense.alpha, defense.beta, defense.step, defense.size) == (0.02, 0.2, 0.01, None)
    assert defense.discriminator


def test_a_trigger_is_blended_into_the_image_or_its_corner():
    pixels, whole = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(blended(pixels, whole, 0.3), 0.7 * pixels + 0.3 * whole)
    small = blended(pixels, torch.ones(2, 3, 2, 2), 0.5)
    assert torch.equal(small[:, :, :2], pixels[:, :, :2])
    assert torch.equal(small[:, :, :, :3], pixels[:, :, :, :3])
    torch.testing.assert_close(small[:, :, 2:, 3:], (pixels[:, :, 2:, 3:] + 1) / 2)


def test_in_an_epoch_every_trigger_is_shown_equally_often():
    opponent = trapdoors()
    labels = torch.cat([opponent.labels_of(10, FIRST, number) for number in range(6)])
    assert labels.bincount().tolist() == [15] * 4
    assert not torch.equal(labels[:10], labels[20:30])  # shuffled anew
    assert torch.equal(labels[:10], opponent.labels_of(10, FIRST, 0))


def test_the_loss_is_the_papers_divided_by_one_minus_beta():
    model = target()
    opponent = trapdoors(model, beta=0.2)
    pixels = images(8, 4).floats()
    shown = opponent.companions(pixels, FIRST, 0)["trapdoor"]
    labels = opponent.labels_of(8, FIRST, 0)
    torch.testing.assert_close(shown, 0.98 * pixels + 0.02 * opponent.triggers[labels])
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(pixels, labels, logits, {}, FIRST, companions={"trapdoor": logits})
    (term,) = opponent.losses(batch).values()
    assert term.weight == pytest.approx(0.2 / 0.8)
    assert torch.equal(term.value, F.cross_entropy(logits, labels))


def test_triggers_step_towards_their_class_and_the_network_stays():
    model = target()
    opponent = trapdoors(model, discriminator=False, step=0.05)
    pixels, start = images(8, 4).floats(), opponent.triggers.clone()
    before, modes = copy_of(model.module), [part.training for part in model.module.modules()]
    model.module(pixels).sum().backward()
    slopes = [weight.grad.clone() for weight in model.module.parameters()]
    before = copy_of(model.module)
    labels = opponent.labels_of(8, FIRST, 0)

    def loss():
        model.module.eval()
        value = F.cross_entropy(model.module(opponent.with_triggers(pixels, labels)), labels)
        model.module.train()
        return value.item()

    first = loss()
    opponent.companions(pixels, FIRST, 0)
    assert loss() < first
    moved = (opponent.triggers - start).abs()
    assert moved.max() <= 0.05 + 1e-6
    assert (moved > 0.04).float().mean() > 0.5
    assert opponent.triggers.min() >= 0
    assert opponent.triggers.max() <= 1
    assert all(
        torch.equal(value, before[name]) for name, value in model.module.state_dict().items()
    )
    assert [part.training for part in model.module.modules()] == modes
    assert all(
        torch.equal(weight.grad, slope)
        for weight, slope in zip(model.module.parameters(), slopes, strict=True)
    )


def test_the_discriminator_learns_to_tell_triggered_images():
    opponent = trapdoors(alpha=0.5, step=1e-9, discriminator_lr=5e-3)
    pixels = STRANGERS.floats()
    for number in range(30):
        opponent.companions(pixels[:32], FIRST, number)
    opponent.discriminator.eval()
    labels = torch.arange(len(pixels)) % 4
    with torch.no_grad():
        plain = opponent.discriminator(pixels)[:, 0]
        triggered = opponent.discriminator(opponent.with_triggers(pixels, labels))[:, 0]
    assert (plain > triggered).float().mean() > 0.9


def test_fixed_triggers_need_no_discriminator():
    opponent = trapdoors(step=0.0)
    start = opponent.triggers.clone()
    assert opponent.discriminator is None
    opponent.companions(images(8, 4).floats(), FIRST, 0)
    assert torch.equal(opponent.triggers, start)
    assert list(opponent.tensors()) == ["triggers"]


def test_its_state_can_be_restored():
    one, other = trapdoors(), trapdoors()
    pixels = images(8, 4).floats()
    one.companions(pixels, FIRST, 0)
    other.restore({name: value.clone() for name, value in one.tensors().items()})
    assert torch.equal(one.triggers, other.triggers)
    assert same_weights(one.discriminator, other.discriminator)


def test_a_training_reports_whether_the_trapdoors_work():
    # Visible and heavy, because the test trains for seconds.
    defense = TrapMid(alpha=0.5, beta=0.5, discriminator=False, step=0.05)
    config = replace(CONFIG, epochs=8)
    facts = train_target(config, split(), [defense], seed=0, work=NoWork()).info["facts"]
    facts = facts["trap_mid"]
    assert facts["trapdoor_success"] > 0.7  # a quarter by chance
    assert facts["without_trigger"] < 0.5
    assert 0 < facts["mean_change"] < 0.5


def test_a_trigger_larger_than_the_image_is_refused():
    message = (
        "trap_mid: a trigger of 17 pixels is larger than the images, 16×16: set size to at most "
        "16, or leave it out for the whole image"
    )
    with pytest.raises(ConfigError, match=message):
        train_target(CONFIG, split(), [TrapMid(size=17)], seed=0, work=NoWork())
    assert TrapMid(size=16).problems(target(), TrainingSize(48, 16, 1)) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"alpha": 0.0}, "alpha: expected more than 0, got 0.0"),
        ({"beta": 1.0}, "beta: expected less than 1, got 1.0"),
        ({"size": 0}, "size"),
    ],
)
def test_bad_parameters_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        TrapMid(**bad)
