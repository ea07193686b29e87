"""The training loop: reproducible, resumable, selects by validation, and reports failures."""

import pytest
import torch

from frostglass.core.errors import CheckpointError, ConfigError, RunError
from frostglass.defenses.base import Defense, Term, TrainingProgress
from frostglass.defenses.training.calor import Calor
from frostglass.defenses.training.label_smoothing import LabelSmoothing
from frostglass.models.checkpoint import save_weights
from frostglass.training.build import rebuild_network, untrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from frostglass.training.trainer import lr_factor, optimizer_of
from worlds import KilledError, MemoryWork, NoWork, same_weights, split

SMALL = Training(model="cnn", options={"width": 4}, epochs=4, batch=16, lr=5e-3)


def train(defenses=(), config=SMALL, work=None, seed=0, data=None):
    return train_target(config, data or split(), defenses, seed=seed, work=work or NoWork())


def test_learns_and_logs_each_term():
    trained = train(
        config=Training(model="cnn", options={"width": 8}, epochs=12, batch=16, lr=5e-3)
    )
    history = trained.info["history"]
    assert history[-1]["cross_entropy"] < history[0]["cross_entropy"]
    assert trained.info["accuracy"]["test"] > 0.9
    assert trained.classes == split().classes
    assert trained.module.training is False


def test_repeats_exactly_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    one, other = train(), train()
    assert same_weights(one.module, other.module)
    assert not same_weights(one.module, train(seed=1).module)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("died_after", [1, 2, 3])
def test_resumes_to_the_same_bytes(died_after):
    defenses = [Calor(rank=2, switch=0.5)]
    whole = train(defenses)
    work = MemoryWork(saves_before_death=died_after)
    with pytest.raises(KilledError):
        train(defenses, work=work)
    work.left = None
    resumed = train(defenses, work=work)
    assert same_weights(whole.module, resumed.module)
    assert whole.info == resumed.info


def test_selection_sees_validation_images_only():
    """Reversed test labels do not change the selected weights."""
    from dataclasses import replace

    data = split()
    turned = replace(data, test=replace(data.test, labels=data.test.labels.flip(0)))
    assert same_weights(train(data=data).module, train(data=turned).module)


def test_only_epochs_at_full_strength_are_selected():
    assert train([Calor(rank=2, switch=0.75)]).info["selected_epoch"] == 3
    assert train([LabelSmoothing(alpha=-0.1)]).info["selected_epoch"] == 3
    with pytest.raises(ConfigError, match="no epoch of 4 is at full defense strength"):
        train([Calor(rank=2, switch=0.9)])


def test_stages_are_logged_under_their_own_names():
    history = train([Calor(rank=2, switch=0.5)]).info["history"]
    assert ["cross_entropy" in row for row in history] == [True, True, False, False]
    assert ["confidence_adaptation" in row for row in history] == [False, False, True, True]


class Exploding(Defense):
    name = "exploding"

    def losses(self, batch):
        return {
            "boom": Term(
                1.0,
                batch.logits.sum()
                * (float("nan") if batch.progress == TrainingProgress(2, 4) else 0.0),
            )
        }


def test_a_loss_that_is_not_finite_says_where_and_keeps_the_last_epoch():
    work = MemoryWork()
    with pytest.raises(
        RunError, match=r"not finite at epoch 2, batch 0 \(cross_entropy .*, boom nan\)"
    ):
        train([Exploding()], work=work)
    assert len(work.kept["training"][1]["history"]) == 2


def test_given_weights_are_loaded_and_not_trained(tmp_path):
    trained = train()
    save_weights(trained.module, tmp_path / "w.safetensors")
    loaded = train(
        config=Training(model="cnn", options={"width": 4}, weights=str(tmp_path / "w.safetensors")),
        seed=9,
    )
    assert same_weights(trained.module, loaded.module)
    assert loaded.info["accuracy"] == trained.info["accuracy"]
    with pytest.raises(CheckpointError, match="4 classes, the model 6"):
        train(
            config=Training(
                model="cnn", options={"width": 4}, weights=str(tmp_path / "w.safetensors")
            ),
            data=split(classes=6),
        )


def test_a_training_on_public_people_is_resumed_from_the_stage_it_was_in():
    config = Training(model="cnn", options={"width": 4}, epochs=2, batch=16, start="public")
    work = MemoryWork(saves_before_death=1)
    with pytest.raises(KilledError):
        train_target(config, split(), seed=0, work=work)
    work.left = None
    assert same_weights(
        train_target(config, split(), seed=0, work=work).module,
        train_target(config, split(), seed=0, work=NoWork()).module,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"start_parts": ["features"]},
            "start_parts names parts of a checkpoint: give its path as start",
        ),
        ({"start": "a.pth", "weights": "b.pth"}, "leave weights or start out"),
        ({"milestones": [1.5]}, "milestones"),
        ({"decay": 0.0}, "decay"),
        ({"crop": 0.0}, "crop"),
        ({"jitter": [0.1, 0.1]}, "jitter"),
        ({"cutout": 1.0}, "cutout"),
        ({"weight_decay": float("nan")}, "weight_decay"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Training(**settings)


def test_schedule_and_optimizer_follow_the_settings():
    config = Training(
        schedule="milestones", milestones=(0.6, 0.8), decay=0.2, optimizer="sgd", nesterov=False
    )
    assert [
        lr_factor(config, TrainingProgress(e, 100)) for e in (0, 59, 60, 79, 80, 99)
    ] == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04])
    assert optimizer_of(config, [torch.nn.Parameter(torch.zeros(1))]).defaults["nesterov"] is False


def test_a_network_is_rebuilt_from_its_recipe():
    recipe = {
        "training": {"model": "cnn", "options": {"width": 4}},
        "defenses": [{"name": "calor", "rank": 2}],
        "classes": 4,
        "image_shape": (3, 16, 16),
        "seed": 5,
    }
    config = Training(model="cnn", options={"width": 4})
    target = untrained(config, tuple("abcd"), (3, 16, 16), [Calor(rank=2)], seed=5)
    assert same_weights(rebuild_network(recipe), target.module)


def test_the_budget_counts_trained_images():
    config = Training(epochs=7)
    assert config.budget(100).trained == 700
    assert config.brief().budget(100).trained == 100
    assert Training(weights="w.pth").budget(100).images == 0


def test_an_explicit_device_overrides_the_default(monkeypatch):
    monkeypatch.setenv("FROSTGLASS_DEVICE", "nowhere")
    trained = train_target(SMALL, split(), seed=0, work=NoWork(), device=torch.device("cpu"))
    assert next(trained.module.parameters()).device.type == "cpu"
