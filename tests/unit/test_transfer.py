"""Transfer learning: the boundary, what stays frozen, and the first stage."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import CheckpointError, ConfigError, DataError
from frostglass.core.types import Target
from frostglass.data._splits import public_people
from frostglass.defenses.base import Stage
from frostglass.defenses.compose import prepare
from frostglass.defenses.training._heads import head_block
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.mid import Mid
from frostglass.defenses.training.transfer import Transfer, _boundary, fisher, ridge_probe
from frostglass.models.build import build
from frostglass.models.checkpoint import save_weights
from frostglass.models.depth import groups, leaves, weights_by_leaf
from frostglass.models.taps import find_head
from frostglass.runtime.seeding import seed_for
from frostglass.training.build import untrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training, first_stage, stage_split
from worlds import SHAPE, NoWork, images, same_weights, split, target

CONFIG = Training(model="cnn", options={"width": 4}, epochs=2, batch=16)


def network(name, shape, classes=1000):
    module = build(name, classes=classes, image_shape=shape, seed=0)
    return Target(
        module=module,
        classes=tuple(map(str, range(classes))),
        image_shape=shape,
        head=find_head(module, shape),
    )


def millions(module):
    return sum(p.numel() for p in module.parameters() if p.requires_grad) / 1e6


def frozen_layers(model):
    return [
        name
        for name, weights in weights_by_leaf(model.module).items()
        if weights and not any(w.requires_grad for w in weights)
    ]


# published boundaries


@pytest.fixture(scope="module")
def vgg():
    return network("vgg16", (3, 64, 64))


@pytest.mark.parametrize(
    ("asked", "found", "convolutions"),
    [
        (15.0e6, 15.04, 7),
        (13.9e6, 13.86, 8),
        (11.5e6, 11.49, 9),
        (9.1e6, 9.13, 10),
        (6.77e6, 6.77, 11),
        (4.41e6, 4.41, 12),
        (2.1e6, 2.05, 13),
    ],
)
def test_published_counts_of_vgg16(vgg, asked, found, convolutions):
    for weight in vgg.module.parameters():
        weight.requires_grad_()
    vgg.module.norm.bias.requires_grad_(False)  # as it is built
    assert millions(vgg.module) == pytest.approx(16.77, abs=0.005)
    model = Transfer(pretrain="start", boundary="parameters", parameters=asked).prepare(vgg, seed=0)
    assert millions(model.module) == pytest.approx(found, abs=0.005)
    still = [
        name
        for name in frozen_layers(model)
        if isinstance(model.module.get_submodule(name), nn.Conv2d)
    ]
    assert len(still) == convolutions


@pytest.mark.parametrize(
    ("name", "total", "asked", "found"),
    [
        ("ir152", 62.60, 17.8e6, 17.83),
        ("facenet", 35.44, 34.4e6, 34.39),
        ("timm:resnet18", 11.69, 8.91e6, 8.91),
    ],
)
def test_published_counts_of_residual_networks(name, total, asked, found):
    model = network(name, (3, 64, 64))
    assert millions(model.module) == pytest.approx(total, abs=0.005)
    Transfer(pretrain="start", boundary="parameters", parameters=asked).prepare(model, seed=0)
    assert millions(model.module) == pytest.approx(found, abs=0.01)


def test_the_ratio_counts_leaf_modules_with_norms_pools_and_activations():
    model = target()  # conv, norm, relu, dropout, pool, flatten, linear: seven leaves
    Transfer(pretrain="start", ratio=0.2).prepare(model, seed=0)  # indices below 1.4: conv and norm
    assert frozen_layers(model) == ["0", "1"]


def test_a_layer_is_the_last_that_is_frozen():
    model = untrained(
        CONFIG,
        tuple("abcd"),
        SHAPE,
        (Transfer(pretrain="start", boundary="layer", layer="stage2"),),
        seed=0,
    )
    assert {name.split(".")[0] for name in frozen_layers(model)} == {"stage1", "stage2"}


@pytest.mark.parametrize(
    "order",
    [(Calor(rank=2), Transfer(pretrain="start")), (Transfer(pretrain="start"), Calor(rank=2))],
)
def test_a_replaced_head_counts_once_and_always_learns(order):
    model = prepare(order, target(), seed=0)
    assert head_block(model) == "6"
    assert frozen_layers(model) == ["0", "1"]
    assert all(p.requires_grad for p in model.module[6].parameters())


def test_a_transformers_positions_freeze_with_its_first_layers():
    module = build("timm:vit_tiny_patch16_224", classes=3, image_shape=(3, 32, 32), seed=0, depth=4)
    model = Target(module=module, classes=tuple("abc"), image_shape=(3, 32, 32), head="head")
    Transfer(pretrain="start", boundary="layer", layer="blocks.1").prepare(model, seed=0)
    assert not module.pos_embed.requires_grad
    assert not any(p.requires_grad for p in module.blocks[1].parameters())
    assert all(p.requires_grad for p in module.blocks[2].parameters())


# invalid boundaries


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": 1.0},
            r"ratio = 1.0 freezes everything, also the head '6': move the boundary towards",
        ),
        ({"ratio": 0.0}, r"ratio = 0.0 freezes nothing: move the boundary towards the head"),
        ({"boundary": "layer", "layer": "6"}, r"layer = 6 freezes everything"),
        ({"boundary": "parameters", "parameters": 1e9}, r"freezes nothing"),
        (
            {"boundary": "parameters", "parameters": 100.0},
            r"parameters = 100 freezes everything: 516 weights come after the last layer",
        ),
    ],
)
def test_everything_and_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Transfer(pretrain="start", **settings).prepare(target(), seed=0)


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match="stage9"):
        untrained(
            CONFIG, tuple("abcd"), SHAPE, (Transfer(boundary="layer", layer="stage9"),), seed=0
        )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"boundary": "parameters"}, r'boundary = "parameters" and parameters go together'),
        (
            {"layer": "stage1"},
            r'and layer go together: give both or neither, got boundary = "ratio"',
        ),
        ({"boundary": "middle"}, "boundary"),
        ({"information": 1.0, "boundary": "fisher"}, "information"),
    ],
)
def test_bad_parameters(bad, message):
    with pytest.raises(ConfigError, match=message):
        Transfer(**bad)


# training


@pytest.fixture(scope="module")
def start():
    first = first_stage(CONFIG, (Transfer(),))
    seed = seed_for(0, "stage")
    return train_target(
        first.config,
        stage_split(split(), first.data, seed=seed),
        first.defenses,
        seed=seed,
        work=NoWork(),
    )


@pytest.mark.parametrize("frozen_norm", ["update", "strict"])
def test_frozen_layers_stay_and_their_statistics_move_only_when_asked(start, frozen_norm):
    model = train_target(
        CONFIG, split(), (Transfer(frozen_norm=frozen_norm),), start=start, work=NoWork()
    )
    before, after = start.module.state_dict(), model.module.state_dict()
    still = frozen_layers(model)
    assert still == ["stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage3.0"]
    for name, value in after.items():
        layer, kind = name.rsplit(".", 1)
        if layer in still:
            same = kind in ("weight", "bias") or frozen_norm == "strict"
            assert torch.equal(value, before[name]) == same, name
    assert not torch.equal(after["stage4.0.weight"], before["stage4.0.weight"])
    assert model.info["trainable"] == sum(
        p.numel() for p in model.module.parameters() if p.requires_grad
    )
    assert model.info["facts"]["transfer"]["last_frozen_layer"] == "stage3.0"
    assert model.info["first_stage"]["data"] == "public"


def test_the_first_stage_is_trained_when_it_is_not_given(start):
    given, own = (
        train_target(CONFIG, split(), (Transfer(),), start=first, work=NoWork())
        for first in (start, None)
    )
    assert same_weights(given.module, own.module)


def test_a_pretrained_network_without_a_boundary_learns_everywhere(start):
    model = train_target(CONFIG, split(), (Transfer(boundary="none"),), start=start, work=NoWork())
    assert frozen_layers(model) == []
    same = train_target(
        Training(model="cnn", options={"width": 4}, epochs=2, batch=16, start="public"),
        split(),
        start=start,
        work=NoWork(),
    )
    assert same_weights(model.module, same.module)


def test_training_begins_from_a_file_of_another_class_count(tmp_path, start):
    save_weights(start.module, tmp_path / "public.safetensors")
    config = Training(
        model="cnn",
        options={"width": 4},
        epochs=2,
        batch=16,
        start=str(tmp_path / "public.safetensors"),
    )
    from_file = train_target(config, split(), (Transfer(pretrain="start"),), work=NoWork())
    from_stage = train_target(CONFIG, split(), (Transfer(),), start=start, work=NoWork())
    assert same_weights(from_file.module, from_stage.module)


def test_a_file_of_another_network_is_refused(tmp_path):
    save_weights(
        build("cnn", classes=3, image_shape=SHAPE, seed=0, width=8), tmp_path / "wide.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"wide.safetensors does not fit"):
        train_target(
            Training(model="cnn", options={"width": 4}, start=str(tmp_path / "wide.safetensors")),
            split(),
            work=NoWork(),
        )


def test_the_stage_takes_the_targets_settings():
    assert Transfer(epochs=7).stage() == Stage("public", {"epochs": 7})
    first = first_stage(CONFIG, (Transfer(epochs=7), Mid()))
    assert (first.data, first.config.epochs, first.config.batch, first.defenses) == (
        "public",
        7,
        16,
        (),
    )
    warm = first_stage(Training(start="public"), (Calor(warmup=5),))
    assert (warm.data, warm.config.epochs, warm.config.start) == ("private", 5, "public")
    assert first_stage(warm.config, warm.defenses).data == "public"


def test_public_people_need_enough_images():
    with pytest.raises(
        DataError,
        match=r"at least 2 people with 3 or more images each, got 5 images of 5 named people",
    ):
        public_people(images(5, 5, names="stranger"), seed=0)
    people = public_people(images(40, 5, names="stranger"), seed=0)
    assert people.classes == tuple(f"stranger {i}" for i in range(5))
    assert set(people.train.sources).isdisjoint(people.validation.sources)


def test_public_people_with_few_images_are_left_out():
    table = images(17, 5, names="stranger").at(
        torch.tensor([0, 1, 5, 6, 10, 11, 2, 15, 16])
    )  # three of 0 and 1... and one of 2
    people = public_people(table, seed=0)
    assert people.classes == ("stranger 0", "stranger 1")
    assert set(people.train.labels.tolist()) == {0, 1}


# the boundary by information


def test_fisher_agrees_with_a_slow_sum_over_images():
    model, data = target(), split().train
    model.module.eval()
    chain = groups(model.module, model.image_shape, "6")
    assert chain == [("0", "1", "2", "3", "4", "5")]
    value = fisher(model, data, chain, seed=0)
    assert value.shape == (1,)
    assert value.item() > 0
    assert all(p.requires_grad for p in model.module.parameters())
    assert all(p.grad is None for p in model.module.parameters())
    # By hand: the same probe, one image at a time, through .backward().
    features = lambda x: model.module[:6](x)  # noqa: E731
    with torch.no_grad():
        known = features(data.floats())
    answers = nn.functional.one_hot(data.labels, 4).float()
    centred = known - known.mean(0)
    gram = centred.T @ centred / len(known)
    probe = torch.linalg.solve(
        gram + 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram)),
        centred.T @ (answers - answers.mean(0)) / len(known),
    )
    total = 0.0
    for row in range(len(data)):
        model.module.zero_grad()
        score = ((features(data.floats(torch.tensor([row]))) - known.mean(0)) @ probe).log_softmax(
            1
        )[0, data.labels[row]]
        score.backward()
        total += sum(
            p.grad.square().sum().item()
            for p in [*model.module[0].parameters(), *model.module[1].parameters()]
        )
    assert value.item() == pytest.approx(total / len(data), rel=1e-3)


@pytest.mark.parametrize(("share", "first"), [(0.95, 0), (0.9, 1), (0.5, 2), (0.4, 3), (0.01, 3)])
def test_the_boundary_leaves_the_requested_share(share, first):
    assert _boundary(torch.tensor([1.0, 2.0, 3.0, 4.0]), share) == first


def test_fisher_boundary_trains(start):
    model = train_target(
        CONFIG, split(), (Transfer(boundary="fisher", information=0.5),), start=start, work=NoWork()
    )
    assert model.info["facts"]["transfer"]["frozen"] > 0
    assert model.info["facts"]["transfer"]["trainable"] > 0


def test_leaves_are_in_order_of_registration():
    assert leaves(target().module) == ["0", "1", "2", "3", "4", "5", "6"]


def test_the_probe_is_the_same_through_the_smaller_matrix():
    tall = torch.randn(30, 12, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    wide = tall.T.contiguous()
    for features in (tall, wide):
        answers = torch.randn(
            len(features), 3, dtype=torch.double, generator=torch.Generator().manual_seed(1)
        )
        count, width = features.shape
        ridge = 1e-3 * (features.T @ features / count).trace() / width
        slow = (
            torch.linalg.inv(
                features.T @ features / count + ridge * torch.eye(width, dtype=torch.double)
            )
            @ features.T
            @ answers
            / count
        )
        assert torch.allclose(ridge_probe(features, answers), slow, atol=1e-10)


# networks whose layers do not all run as layers


@pytest.mark.parametrize(
    ("name", "options", "layer", "free"),
    [
        (
            "torchvision:vit_b_16",
            {"patch_size": 16, "num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16},
            "encoder.layers.encoder_layer_1",
            ("encoder.layers.encoder_layer_2", "encoder.ln", "heads"),
        ),
        (
            "timm:swinv2_tiny_window8_256",
            {"window_size": 4, "embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 3)},
            "layers.1",
            ("layers.2", "layers.3", "norm", "head"),
        ),
    ],
)
def test_attention_is_frozen_with_the_block_around_it(name, options, layer, free):
    if name.startswith("torchvision:vit"):
        from torchvision.models import VisionTransformer

        module = VisionTransformer(image_size=64, num_classes=3, **options)
    else:
        module = build(name, classes=3, image_shape=(3, 64, 64), seed=0, **options)
    model = Target(
        module=module,
        classes=tuple("abc"),
        image_shape=(3, 64, 64),
        head=find_head(module, (3, 64, 64)),
    )
    Transfer(pretrain="start", boundary="layer", layer=layer).prepare(model, seed=0)
    learns = {weight for weight, value in module.named_parameters() if value.requires_grad}
    assert learns
    assert {weight for weight in learns if not weight.startswith(free)} == set()
    assert {weight for weight, _ in module.named_parameters() if weight.startswith(free)} == learns


def test_a_part_under_two_names_and_norms_without_weights():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.body = nn.Sequential(self.conv, nn.BatchNorm2d(4, affine=False))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.body(x).mean((2, 3)))

    model = Target(module=Odd(), classes=("a", "b"), image_shape=(3, 16, 16), head="head")
    defense = Transfer(pretrain="start", boundary="layer", layer="body", frozen_norm="strict")
    defense.prepare(model, seed=0)
    assert not model.module.conv.weight.requires_grad
    model.module.train()
    defense.modes(model)
    assert not model.module.body[1].training
    assert model.module.head.training
