"""Disco: the mask, the gradients of each network, and the layers around the pruner."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.auditing.networks import classifier
from frostglass.core.errors import ConfigError
from frostglass.core.types import Target
from frostglass.defenses.base import Batch, TrainingProgress, TrainingSize
from frostglass.defenses.compose import losses, prepare, problems
from frostglass.defenses.training.disco import Disco, Pruned, Pruner, masked, scaled_gradient
from frostglass.defenses.training.tiprdc import Tiprdc
from frostglass.defenses.training.transfer import Transfer
from frostglass.models.build import build
from frostglass.models.cut import halves
from frostglass.models.taps import find_head, find_taps
from frostglass.models.wrap import wrap
from frostglass.networks.decoder import standardised
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import seeded
from frostglass.store.store import Store
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import KilledError, MemoryWork, NoWork, images, same_weights, split, target

CUT = "2"
TINY = {
    "decoder_width": 4,
    "pruner_width": 4,
    "head_start": 2,
    "public_batch": 8,
    "fresh_share": 0,
}
CONFIG = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3, cut="stage2")
STRANGERS = images(40, 5, seed=9, names="stranger")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(name="cnn", cut="stage2", **more):
    module = build(name, classes=4, image_shape=(3, 16, 16), seed=0, width=4, **more)
    return Target(
        module=module,
        classes=("a", "b", "c", "d"),
        image_shape=(3, 16, 16),
        head=find_head(module, (3, 16, 16)),
        taps=find_taps(module, (3, 16, 16)),
        cut=cut,
    )


@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.7, 0.99])
def test_the_mask_follows_its_definition(ratio):
    with seeded(0):
        pruner = Pruner((10, 4, 4), ratio=ratio, width=2, temperature=1 / 30)
    features = noise(5, 10, 4, 4)
    mask, scores = pruner.eval()(features), pruner.scores(features)
    for row, own in zip(mask.tolist(), scores.tolist(), strict=True):
        threshold = sorted(own)[int(ratio * 10)]
        slow = [torch.tensor(30.0 * (score - threshold)).sigmoid().item() for score in own]
        assert row == pytest.approx(slow, rel=1e-3, abs=1e-6)


def test_of_64_channels_the_published_ratio_leaves_one_half():
    with seeded(0):
        pruner = Pruner((64,), ratio=0.99, width=8, temperature=1 / 30)
    assert pruner.pruned == 63
    mask = pruner.eval()(noise(7, 64))
    assert torch.equal(mask.max(1).values, torch.full((7,), 0.5))
    assert ((mask < 0.5).sum(1) == 63).all()


def test_a_mask_multiplies_whole_channels():
    maps, vectors, mask = (
        noise(2, 3, 4, 5),
        noise(2, 3),
        torch.rand(2, 3, generator=torch.Generator().manual_seed(1)),
    )
    for n in range(2):
        for channel in range(3):
            assert torch.equal(masked(maps, mask)[n, channel], maps[n, channel] * mask[n, channel])
    assert torch.equal(masked(vectors, mask), vectors * mask)


def test_a_scaled_gradient_changes_no_digit():
    values = noise(50).requires_grad_()
    passed = scaled_gradient(values, 0.3)
    assert torch.equal(passed, values)
    passed.square().sum().backward()
    torch.testing.assert_close(values.grad, 0.3 * 2 * values.detach())


def test_the_gradient_of_each_network():
    """Encoder and rest: the task; pruner: (1 - α) task - α reconstruction; decoder: nothing."""
    alpha, defense = 0.4, Disco(ratio=0.5, alpha=0.4, **TINY)
    model = defense.prepare(replace(target(), cut=CUT), seed=3)
    module, pruned = model.module.train(), model.module[2]
    module[3].p = 0.0  # dropout would draw again for the reference
    opponent = defense.opponent(model, STRANGERS, None, seed=0)
    opponent.turn(TrainingProgress(0, 4), 0)
    for some in (module, opponent.game.decoder):
        some.double()
    pixels, labels = images(8, 4).floats().double(), images(8, 4).labels

    names = defense.taps(model)
    with capture(module, names) as tapped:
        logits = module(pixels)
    terms = losses(
        [defense],
        Batch(pixels, labels, logits, dict(tapped), TrainingProgress(0, 4)),
        [names],
        [opponent],
    )
    assert {name: term.weight for name, term in terms.items()} == {
        "cross_entropy": 1.0,
        "reconstruction": -alpha,
    }
    sum(term.weight * term.value for term in terms.values()).backward()
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    assert all(weight.grad is None for weight in opponent.game.decoder.parameters())

    # By hand: a pass for encoder and rest with a constant mask, and one for the pruner with
    # constant features.
    features = module[:2](pixels).relu()
    mask = pruned.pruner(features.detach())
    F.cross_entropy(module[3:](masked(features, mask.detach())), labels).backward()
    for name in ("0.weight", "1.weight", "6.weight", "6.bias"):
        torch.testing.assert_close(gradients[name], module.get_parameter(name).grad)
    module.zero_grad(set_to_none=True)
    still = features.detach()
    task = F.cross_entropy(module[3:](masked(still, mask)), labels)
    decoded = opponent.game.decoder(standardised(masked(still, mask)))
    ((1 - alpha) * task - alpha * (decoded - pixels).square().mean()).backward()
    for name, weight in pruned.pruner.named_parameters():
        torch.testing.assert_close(gradients[f"2.pruner.{name}"], weight.grad)
    assert sum(weight.grad.abs().sum() for weight in pruned.pruner.parameters()) > 0


def test_an_attacker_sees_true_gradients():
    """In evaluation nothing is detached or scaled: gradients match finite differences."""
    model = Disco(ratio=0.5, **TINY).prepare(network(), seed=0)
    encoder = halves(model).encoder
    module = model.module.eval().double()
    pixels = images(2, 2).floats().double().requires_grad_()
    direction = noise(2, 8, 4, 4).double()

    def released(pixels):
        return (encoder(pixels) * direction).sum()

    module.requires_grad_(False)
    (slope,) = torch.autograd.grad(released(pixels), pixels)
    step = 1e-6 * noise(*pixels.shape, seed=1).double()
    with torch.no_grad():
        measured = (released(pixels + step) - released(pixels - step)) / 2
    assert measured.item() == pytest.approx((slope * step).sum().item(), rel=1e-4)


def test_a_cut_gives_masked_features():
    plain, model = network(), Disco(ratio=0.5, **TINY).prepare(network(), seed=0)
    pruned = model.module.stage2
    assert isinstance(pruned, Pruned)
    for module in (plain.module, model.module):
        module.eval()
    with torch.no_grad():
        features = halves(plain).encoder(images(4, 4).floats())
        released = halves(model).encoder(images(4, 4).floats())
        assert torch.equal(released, masked(features, pruned.pruner(features)))
    assert halves(model).feature_shape == halves(plain).feature_shape == (8, 4, 4)


def test_the_same_seed_makes_the_same_pruner_and_other_weights_stay():
    plain, one, other = network(), *(Disco(**TINY).prepare(network(), seed=seed) for seed in (0, 0))
    assert same_weights(one.module, other.module)
    assert not same_weights(one.module, Disco(**TINY).prepare(network(), seed=1).module)
    kept = plain.module.state_dict()
    moved = {
        name.replace("stage2.inner.", "stage2."): tensor
        for name, tensor in one.module.state_dict().items()
        if ".pruner." not in name
    }
    assert moved.keys() == kept.keys()
    assert all(torch.equal(moved[name], kept[name]) for name in kept)
    one.module.load_state_dict(
        Disco(**TINY).prepare(network(), seed=9).module.state_dict()
    )  # names and shapes are those of any other


def test_names_of_layers_inside_the_cut_are_updated():
    model = replace(
        network("resnet", "stage1"), taps=("stem", "stage1.0.conv1", "stage1", "stage2")
    )
    moved = Disco(**TINY).prepare(model, seed=0)
    assert moved.taps == ("stem", "stage1.inner.0.conv1", "stage1", "stage2")
    assert moved.head == "head"
    whole = Disco(**TINY).prepare(network(cut="head"), seed=0)
    assert whole.head == "head.inner"
    assert whole.outputs(images(3, 3).floats())[1].shape == (3, 32)
    normalised = replace(network(mean=[0.5] * 3, std=[0.5] * 3), cut="net.stage2")
    assert isinstance(Disco(**TINY).prepare(normalised, seed=0).module.net.stage2, Pruned)


def test_vectors_are_pruned_too():
    model = Disco(ratio=0.5, **TINY).prepare(network(cut="flatten"), seed=0)
    assert model.module.flatten.pruner.pruned == 16
    assert model.module.eval()(images(3, 3).floats()).shape == (3, 4)
    assert halves(model).feature_shape == (32,)


class Turned(nn.Module):
    """Images (N, 3, 16, 16) as something of another shape."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, images):
        return self.turn(images)


def turned(turn):
    with seeded(0):
        module = nn.Sequential(nn.Conv2d(3, 6, 1), Turned(turn), nn.Flatten(), nn.LazyLinear(4))
        module(torch.zeros(2, 3, 16, 16))
    return Target(
        module=module, classes=("a", "b", "c", "d"), image_shape=(3, 16, 16), head="3", cut="1"
    )


TURNS = {
    "maps with channels last": (lambda maps: maps.permute(0, 2, 3, 1), 2),
    "tokens": (lambda maps: maps.flatten(2).transpose(1, 2), 1),
    "maps": (lambda maps: maps * 1, 0),
}


@pytest.mark.parametrize("kind", TURNS)
def test_channels_are_pruned_on_any_axis(kind):
    turn, axis = TURNS[kind]
    model = Disco(ratio=0.5, **TINY).prepare(turned(turn), seed=0)
    pruned = model.module[1]
    assert pruned.pruner.pruned == 3
    pixels = images(4, 4).floats()
    with torch.no_grad():
        plain = turned(turn).module[:2](pixels)
        out, mask = model.module.eval()[:2](pixels), pruned.pruner(plain)
    assert mask.shape == (4, 6)
    for channel in range(6):
        one, whole = (values.movedim(1 + axis, 1)[:, channel] for values in (out, plain))
        torch.testing.assert_close(one, whole * mask[:, channel].reshape(-1, *[1] * (one.ndim - 1)))
    assert (
        (mask > 0.5).sum(1) == 2
    ).all()  # three of six are below the threshold, whose own mask is ½


@pytest.mark.parametrize("kind", TURNS)
def test_training_prunes_channels_on_any_axis(kind):
    disco = Disco(ratio=0.5, **TINY)
    model = disco.prepare(turned(TURNS[kind][0]), seed=0)
    opponent = disco.opponent(model, STRANGERS, None, seed=0)
    opponent.turn(TrainingProgress(0, 1), 0)
    pixels = images(4, 4).floats()
    with capture(model.module, disco.taps(model)) as tapped:
        logits = model.module.train()(pixels)
    (term,) = opponent.losses(
        Batch(pixels, torch.zeros(4).long(), logits, tapped, TrainingProgress(0, 1))
    ).values()
    term.value.backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all()
        for weight in model.module[1].pruner.parameters()
    )


def test_features_without_channels_are_refused():
    message = (
        r"disco prunes vectors, tokens or maps of at least 2 channels, and '1' returns "
        r"\(6, 4, 4, 16\): cut after another layer"
    )
    with pytest.raises(ConfigError, match=message):
        Disco().prepare(turned(lambda maps: maps.reshape(-1, 6, 4, 4, 16)), seed=0)
    with pytest.raises(ConfigError, match=r"'1' returns \(1, 16, 16\)"):
        Disco().prepare(turned(lambda maps: maps[:, :1]), seed=0)


def test_a_cut_after_the_last_layer_is_refused():
    model = Disco(**TINY).prepare(network(cut="head"), seed=0)
    message = (
        "nothing comes after head, so that the released features are the predictions and no "
        "server is needed: cut after an earlier layer"
    )
    assert Disco(**TINY).problems(model, TrainingSize(48, 16, 4)) == [message]
    assert (
        Disco(**TINY).problems(
            Disco(**TINY).prepare(network(cut="stage3"), seed=0), TrainingSize(48, 16, 4)
        )
        == []
    )


def test_no_other_defense_freezes_its_pruner():
    for order in ((0, 1), (1, 0)):
        pair = [Disco(**TINY), Transfer(pretrain="start")]
        model = prepare([pair[place] for place in order], network(cut="stage3"), seed=0)
        assert all(weight.requires_grad for weight in model.module.stage3.pruner.parameters())
        assert not model.module.stage1[0].weight.requires_grad
    model.module.stage3.pruner.requires_grad_(False)
    size = TrainingSize(48, 16, 4)
    assert problems([Disco(**TINY)], model, size) == [
        "disco: another defense froze its pruner: freeze fewer layers, or cut after a later one"
    ]
    assert problems([Disco()], target(), size) == [
        "disco: needs to know where the network is cut: set target.cut"
    ]


@pytest.mark.parametrize(
    "more", [{}, {"restart_every": 2, "ratio": 0.5}, Disco.variants["crafter"][1], {"alpha": 0.0}]
)
def test_an_interrupted_training_resumes_to_the_same_bytes(more):
    def train(work):
        return train_target(CONFIG, split(), [Disco(**TINY | more)], seed=0, work=work)

    whole, work = train(NoWork()), MemoryWork(saves_before_death=2)
    with pytest.raises(KilledError):
        train(work)
    work.left = None
    resumed = train(work)
    assert same_weights(whole.module, resumed.module)
    assert whole.info == resumed.info
    assert whole.info["facts"]["disco"] == {
        "cut": "stage2",
        "below_threshold": 4 if "ratio" in more else 7,
    }
    assert ("reconstruction" in whole.info["history"][0]) == (more.get("alpha") != 0.0)


@pytest.mark.parametrize(
    "defense", [Disco(**TINY), Tiprdc(epochs=1, reader_width=2)], ids=lambda defense: defense.name
)
def test_a_stored_network_loads_unchanged(defense, tmp_path):
    model, read = (
        classifier(Store(tmp_path / "store"), replace(CONFIG, epochs=1), split(), [defense], seed=0)
        for _ in range(2)
    )
    assert model.module is not read.module
    assert same_weights(model.module, read.module)
    assert (read.cut, read.head, read.taps) == (model.cut, model.head, model.taps)
    pixels = images(4, 4).floats()
    with torch.no_grad():
        assert torch.equal(
            halves(model).encoder.eval()(pixels), halves(read).encoder.eval()(pixels)
        )


def test_alpha_zero_still_prunes_and_ratio_zero_does_not():
    model = replace(target(), cut=CUT)
    assert Disco(ratio=0.0, alpha=0.0).prepare(model, seed=0) is model
    assert Disco(ratio=0.0, alpha=0.0).problems(target(), TrainingSize(48, 16, 4)) == []
    pruning = Disco(alpha=0.0, **TINY)
    assert pruning.opponent(pruning.prepare(model, seed=0), STRANGERS, None, seed=0) is None
    assert pruning.replaces() == {"training of the encoder"}
    assert not pruning.couples_samples()
    with pytest.raises(
        ConfigError,
        match=r"alpha 0\.4 trains a pruner, and ratio 0 inserts none: give a ratio above 0",
    ):
        Disco(ratio=0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"ratio": 1.0},
        {"ratio": -0.1},
        {"alpha": 1.1},
        {"temperature": 0.0},
        {"decoder_lr": float("inf")},
    ],
)
def test_bad_parameters(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Disco(**bad)


def test_only_the_second_half_may_be_selected():
    assert [Disco().at_full_strength(TrainingProgress(epoch, 4)) for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert Disco(alpha=0.0).at_full_strength(TrainingProgress(0, 4))


def test_a_swins_maps_are_pruned_by_their_channels():
    options = {
        "img_size": 32,
        "embed_dim": 12,
        "depths": (1, 1),
        "num_heads": (2, 2),
        "window_size": 4,
    }
    module = build(
        "timm:swin_tiny_patch4_window7_224", classes=4, image_shape=(3, 32, 32), seed=0, **options
    )
    model = Disco(ratio=0.5, **TINY).prepare(
        wrap(module, classes=4, image_shape=(3, 32, 32), cut="layers.0"), seed=0
    )
    assert halves(model).feature_shape == (8, 8, 12)
    assert model.module.layers[0].pruner.pruned == 6
    assert model.module.layers[0].pruner(noise(2, 8, 8, 12)).shape == (2, 12)


def test_random_pruning_removes_other_channels_of_each_image_and_learns_nothing():
    defense = Disco(ratio=0.5, alpha=0.0, selection="random", **TINY)
    model = defense.prepare(network(), seed=0)
    pruned = model.module.get_submodule(model.cut)
    features = torch.rand(6, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = pruned.pruner(features)
    channels = masks.shape[1]
    assert list(pruned.pruner.parameters()) == []
    assert ((masks > 0.5).sum(1) == channels - pruned.pruner.pruned - 1).all()
    assert len({tuple(row) for row in (masks > 0.5).tolist()}) > 3
    torch.testing.assert_close(masks[2:4], pruned.pruner(features[2:4]))  # by the image alone
    assert defense.problems(model, TrainingSize(48, 16, 4)) == []
    with pytest.raises(ConfigError, match=r"learns nothing, and alpha 0\.4 trains a pruner"):
        Disco(selection="random")
