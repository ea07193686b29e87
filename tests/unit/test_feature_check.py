"""What `check` says of a config about split models: every problem before anything is computed, and how long it would take."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tests.worlds import SHAPE, MemoryWork, images, prior
from torch import nn
from typer.testing import CliRunner

from frostglass.attacks.features.base import Effort, Ledger
from frostglass.attacks.features.decoder import Decoder
from frostglass.attacks.features.hybrid import Hybrid
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.features.mapper import Mapper
from frostglass.audit.feature_grid import run_all_features
from frostglass.audit.feature_pipeline import Pictures, produce_features
from frostglass.audit.features import FeatureExperiment, feature_experiments
from frostglass.cli.main import app
from frostglass.core.assets import Assets
from frostglass.core.errors import ConfigError
from frostglass.core.types import Halves, Target
from frostglass.core.views import FeatureView
from frostglass.defenses.release._crafting import Inversion
from frostglass.defenses.release._critic import Judge
from frostglass.defenses.release.crafter import Crafter
from frostglass.defenses.release.crafter_z import CrafterZ
from frostglass.plan import feature_estimate as feature_estimate_module
from frostglass.plan import feature_time, memory
from frostglass.plan.cost import counts_of
from frostglass.plan.feature_cost import feature_problems
from frostglass.plan.feature_estimate import feature_estimate
from frostglass.plan.feature_memory import FeatureRehearsal
from frostglass.plan.memory import Need, foreseen
from frostglass.report.charts import toml
from frostglass.runtime.device import override_device
from frostglass.store.files import Work
from frostglass.store.store import Store

SMALL = {"epochs": 1, "batch": 16, "options": {"width": 4}}
CRAFT = {
    "name": "crafter",
    "steps": 2,
    "inner_steps": 2,
    "terms": 2,
    "critic_steps": 1,
    "index_steps": 3,
    "first_steps": 2,
    "batch": 4,
}
TOY = {
    "name": "toy features",
    "data": {
        "name": "faces",
        "size": 16,
        "identities": 4,
        "images": 10,
        "public_identities": 8,
        "public_images": 4,
    },
    "split": {"test": 0.3, "validation": 0.1},
    "target": {**SMALL, "model": "cnn", "attributes": ["all"], "cut": "stage1"},
    "evaluators": [{"model": "lenet", "epochs": 1}],
    "embedder": {**SMALL, "model": "resnet"},
    "perceptual": {**SMALL, "model": "cnn"},
    "prior": {"name": "wgan", "steps": 2, "critic_steps": 1, "width": 4, "batch": 8, "latent": 6},
    "amortizer": {"steps": 2, "batch": 4, "width": 4},
    "attack": {"name": "latent", "steps": 2},
    "judging": {"identities": 3, "pictures": 2},
}
LEARNED = {"name": "decoder", "epochs": 1, "width": 4, "adapt": 6, "adapt_epochs": 1, "averaged": 2}
GRID = {key: value for key, value in TOY.items() if key != "attack"} | {
    "grid": {
        "defenses": [[], [CRAFT]],
        "case": [
            {"case": "decoder", "attack": LEARNED},
            {
                "case": "latent",
                "attack": {"name": "latent", "steps": 2, "tries": 2, "start": "amortized"},
            },
        ],
    }
}


def told(changes):
    return feature_problems(feature_experiments(TOY | changes))


# --- problems -----------------------------------------------------------------------------------------------------------------------------

RESIZED = {"name": "pretrained", "weights": "faces32", "resize": True}
LATE = {
    "a critic that cannot take the pictures": (
        {"data": {**TOY["data"], "size": 24}, "prior": RESIZED, "defenses": [CRAFT]},
        "defenses: the critic of crafter takes square pictures of 8, 16, 32, ... pixels, got 24×24: change data.size",
    ),
    "a prior of another shape": (
        {"prior": RESIZED, "defenses": [{"name": "crafter_z"}]},
        "defenses: the prior makes pictures of 3×32×32 and the encoder takes 3×16×16: use a prior of the data's own shape",
    ),
    "a prior that completes pictures": (
        {"prior": {"name": "context", "diversity": 0.0}},
        "prior: context makes pictures of a given hint, and a feature comes without one: use another, such as wgan",
    ),
    "too few public pictures for a generator to adapt": (
        {"attack": {"name": "latent", "adapt": 33}},
        "attack: latent.adapt asks for 33 public pictures, and there are 32: lower it",
    ),
    "too few public pictures for a decoder to adapt": (
        {"attack": {"name": "decoder", "adapt": 33}},
        "attack: decoder.adapt asks for 33 public pictures, and there are 32: lower it",
    ),
    "too few for the attack that makes the start": (
        {"attack": {"name": "hybrid", "starter": {"adapt": 33}}},
        "attack: decoder.adapt asks for 33 public pictures, and there are 32: lower it",
    ),
    "a picture to adapt to, and none held out": (
        {"attack": {"name": "latent", "adapt": 1}},
        "attack: latent.adapt (1) must leave a picture that is not held out: raise it, or set it to 0",
    ),
    "all pictures held out": (
        {"attack": {"name": "mapper", "validation": 0.99}},
        "attack: mapper learns from public pictures, and there are 32: at least 2 that are not held out are needed",
    ),
    "more people than there are": (
        {"judging": {"identities": 5}},
        "judging: identities is 5, and there are 4 private people: lower it, or leave it out to attack all of them",
    ),
    "nobody with two photos": (
        {"data": {**TOY["data"], "images": 3}, "judging": {"pictures": 1}},
        "data: nobody has more than 3 pictures, of which 2 are held out, and two photos of one person that are not must be compared to tell what a similarity "
        "means: give more pictures of a person",
    ),
}


@pytest.mark.parametrize(("changes", "problem"), LATE.values(), ids=LATE)
def test_what_would_come_late_is_told_at_once(changes, problem):
    assert problem in told(changes)


def test_too_few_photos_to_compare_can_be_shipped():
    few = feature_experiments(
        TOY | {"data": {**TOY["data"], "images": 3}, "judging": {"pictures": 1}}
    )
    assert feature_problems(few)
    assert not feature_problems(few, shipped=True)


def folder_of(place, people, *, pictures=4):
    for person in people:
        (place / person).mkdir(parents=True)
        for number in range(pictures + (person == people[0])):
            shade = 40 * number + len(person)
            Image.new("RGB", (16, 16), (shade, 9 * len(place.name), 7 * number)).save(
                place / person / f"{person}{number}.png"
            )
    return place


@pytest.fixture
def album(tmp_path):
    """A config on folders of pictures with a table that says nothing of the public ones."""
    private, public = (
        folder_of(tmp_path / "private", ["anna", "bo"]),
        folder_of(tmp_path / "public", ["cleo", "dimitri"]),
    )
    lines = [
        f"{file.relative_to(private).as_posix()},{number % 2}"
        for number, file in enumerate(sorted(private.rglob("*.png")))
    ]
    (tmp_path / "table.csv").write_text("\n".join(["picture,hat", *lines]), encoding="utf-8")
    data = {
        "name": "folder",
        "private": str(private),
        "public": str(public),
        "size": 16,
        "attributes": str(tmp_path / "table.csv"),
    }
    return TOY | {"data": data, "judging": {"pictures": 1, "identities": 2}}


def test_a_table_without_public_lines_will_do_unless_a_training_begins_there(album):
    assert feature_problems(feature_experiments(album)) == []
    begun = album | {"target": {**TOY["target"], "start": "public"}}
    (problem,) = feature_problems(feature_experiments(begun))
    assert problem.startswith("data: ")
    assert "says nothing of public pictures" in problem
    assert problem.endswith("or leave target.start out")


def test_one_person_with_enough_photos_is_enough(album, tmp_path):
    (tmp_path / "private" / "bo" / "bo3.png").unlink()
    assert feature_problems(feature_experiments(album)) == []


def test_nobody_is_named(album, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    Image.new("RGB", (16, 16)).save(loose / "a.png")
    nameless = album | {"data": {**album["data"], "private": str(loose), "attributes": None}}
    assert feature_problems(feature_experiments(nameless)) == [
        "data: no private person is named: private pictures need one sub-folder per identity, named after it"
    ]


def test_a_picture_on_both_sides(album, tmp_path):
    folder_of(tmp_path / "public", ["anna"], pictures=1)
    (problem,) = feature_problems(feature_experiments(album))
    assert problem.endswith(
        "anna/anna0.png, anna/anna1.png are both private and public: a person must be on one side only"
    )


@pytest.mark.parametrize(
    "defense", [{"name": "crafter", "realism": 1.0}, {"name": "crafter_z", "realism": 1.0}]
)
def test_a_prior_without_a_critic_is_told_to_whoever_needs_one(defense, monkeypatch):
    bare = SimpleNamespace(critic=None, condition="", latent=6, image_shape=SHAPE, info={})
    monkeypatch.setattr("frostglass.plan.feature_cost.offered", lambda method, shape: bare)
    assert told({"defenses": [defense]}) == [
        f"defenses: {defense['name']}.realism is not 0 and the prior has no critic: set it to 0"
    ]
    assert told({"attack": {"name": "latent", "critic_weight": 1.0}}) == [
        "attack: latent.critic_weight is not 0 and the prior has no critic: set it to 0"
    ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"judging": {"identities": 1}}, "judging.identities: expected at least 2, got 1"),
        ({"defenses": [{**CRAFT, "batch": 1}]}, r"defenses\[0\].batch: expected at least 2, got 1"),
        ({"attack": {"name": "decoder", "batch": 1}}, "attack.batch: expected at least 2, got 1"),
        ({"amortizer": {"batch": 1}}, "amortizer.batch: expected at least 2, got 1"),
        ({"evaluators": []}, "evaluators: at least one is needed"),
    ],
)
def test_what_a_config_alone_tells(changes, match):
    with pytest.raises(ConfigError, match=match):
        feature_experiments(TOY | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attack": {"name": "latent", "adapt": 32}, "defenses": [CRAFT]},
        {"attack": {"name": "latent", "start": "amortized"}, "prior": RESIZED},
        {"attack": {"name": "hybrid", "starter": {"epochs": 1}}},
        {
            "attack": {"name": "decoder", "variant": "perceptual"},
            "defenses": [{**CRAFT, "steps": 0}],
            "prior": RESIZED,
        },
        {"judging": {"identities": 4}},
    ],
)
def test_what_can_be_run_is_not_refused(changes):
    assert told(changes) == []


def test_what_is_wrong_with_a_prior_is_told_once():
    problems = told({"prior": {"name": "pretrained", "weights": "nowhere"}, "defenses": [CRAFT]})
    assert len(problems) == 1
    assert problems[0].startswith("prior: ")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("command", ["check", "run"])
def test_both_commands_tell_it_and_compute_nothing(command, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(
        toml(TOY | {"defenses": [CRAFT], "prior": RESIZED, "judging": {"identities": 9}})
    )
    done = call(command, path, "--store", tmp_path / "store")
    assert done.exit_code == 2
    assert "identities is 9, and there are 4 private people" in done.stderr
    assert "the prior makes pictures of 3×32×32" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.toml"]


# --- steps --------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def unrehearsed(monkeypatch):
    """Leaves memory out, which takes longer than all the rest."""
    monkeypatch.setattr(feature_estimate_module, "foreseen", lambda *_: Need(2**30, "a step"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    run_all_features(GRID, Store(folder))
    return folder


def kinds(costs):
    return Counter(row["step"] for row in costs["steps"])


def made(folder):
    return Counter(
        {
            kind.name: len([step for step in kind.iterdir() if step.is_dir()])
            for kind in folder.iterdir()
            if kind.is_dir()
        }
    )


def test_the_steps_that_are_foreseen_are_those_that_are_made(
    finished, unrehearsed, tmp_path, monkeypatch
):
    monkeypatch.setattr(feature_time, "timed", lambda step: 0.0)
    costs = feature_estimate(feature_experiments(GRID), Store(tmp_path / "nothing"))
    assert kinds(costs) == made(finished) + Counter(measures=1)
    assert not any(row["done"] for row in costs["steps"])
    assert not (tmp_path / "nothing").exists()
    told = [row["work"] for row in costs["steps"]]
    assert (
        told.count("crafter for 6 pictures") == 2
    )  # those of the victims, and as many public ones to adapt to
    assert "crafter for 6 pictures, release 2" in told


def test_steps_that_are_there_are_told_by_their_keys(finished, unrehearsed):
    costs = feature_estimate(feature_experiments(GRID), Store(finished))
    *steps, measures = costs["steps"]
    assert all(row["done"] for row in steps)
    assert all((finished / row["step"] / row["key"]).is_dir() for row in steps)
    assert costs["seconds"] == measures["seconds"] > 0


def test_only_what_is_missing_counts(finished, unrehearsed):
    other = GRID | {"grid": GRID["grid"] | {"defenses": [[], [{**CRAFT, "beta": 7.0}]]}}
    costs = feature_estimate(feature_experiments(other), Store(finished))
    missing = Counter(row["step"] for row in costs["steps"] if not row["done"])
    # The victims' features and once more, public ones; an attack and its scores for each case. What was learned from plain features is there.
    assert missing == {"release": 3, "intercept": 2, "feature_scores": 2, "measures": 1}


def test_the_command(unrehearsed, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(toml(GRID))
    before = torch.get_rng_state()
    done = call("check", path, "--store", tmp_path / "store")
    assert done.exit_code == 0, done.output
    assert "no problems; about" in done.output
    assert "1.0 GiB of memory (a step)" in done.output
    assert torch.equal(before, torch.get_rng_state())
    costs = json.loads(call("check", path, "--store", tmp_path / "store", "--json").stdout)
    assert costs["seconds"] == pytest.approx(sum(row["seconds"] for row in costs["steps"]))
    assert all(
        row["seconds"] > 0
        for row in costs["steps"]
        if row["step"] in ("target", "lesson", "intercept", "release", "amortizer")
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy.toml"]


def test_networks_are_timed_once_for_a_grid(unrehearsed, tmp_path, monkeypatch):
    clock = []
    monkeypatch.setattr(feature_time, "timed", lambda step: clock.append(step) or 1.0)
    one = feature_estimate(feature_experiments(GRID), Store(tmp_path))
    first = len(clock)
    more = GRID | {
        "grid": GRID["grid"]
        | {"defenses": [[], [CRAFT], [{**CRAFT, "beta": 3.0}], [{**CRAFT, "beta": 4.0}]]}
    }
    several = feature_estimate(feature_experiments(more), Store(tmp_path))
    assert len(clock) == 2 * first
    released = [
        sum(
            row["seconds"]
            for row in costs["steps"]
            if row["step"] == "release" and "crafter" in row["work"]
        )
        for costs in (one, several)
    ]
    assert released[1] == pytest.approx(3 * released[0])


# --- how much there is to do --------------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A linear encoder that counts the pictures that pass it, with gradients and without."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(4, 3 * 16 * 16, generator=torch.Generator().manual_seed(0))
        )
        self.passed = Counter()

    def forward(self, pictures):
        self.passed[torch.is_grad_enabled()] += len(pictures)
        return pictures.flatten(1) @ self.weight.T


def attacked(attack, public=24, victims=5):
    """The encoder and the student's steps after an attack on some random features."""
    encoder = Counting().requires_grad_(False).eval()
    both = Halves(encoder, nn.Identity(), SHAPE, (4,), "cut")
    view = FeatureView(
        both, torch.randn(victims, 4, generator=torch.Generator().manual_seed(1)), attack.granted
    )
    assets = Assets(images(public, 4), prior())
    attack.rebuild(view, view.released, assets, seed=0, ledger=Ledger(Work.scratch(), view))
    return encoder.passed


@pytest.mark.parametrize(
    "attack",
    [
        Latent(steps=3, tries=2),
        Latent(steps=2, tries=7, batch=16),
        Hybrid(start="noise", steps=3),
        Hybrid(start="latent", steps=2, starter={"steps": 3}),
    ],
)
def test_pictures_along_gradients_are_counted_with_those_that_fill_a_batch(attack):
    effort = attack.effort(5)
    assert attacked(attack)[True] == effort.through_prior + effort.pixels


def test_adapting_counts_every_search():
    attack = Latent(steps=2, tries=1, adapt=8, adapt_rounds=3, adapt_epochs=5)
    searched = attacked(attack)[True]
    assert (
        attack.effort(5).through_prior == searched + 3 * 5 * 6
    )  # and the generator's own steps, with the 6 of 8 pictures that are not held out


@pytest.mark.parametrize("adapt", [0, 9])
def test_steps_of_learning_are_counted(adapt, monkeypatch):
    attack = Decoder(epochs=3, batch=4, width=4, adapt=adapt, adapt_epochs=2, validation=0.25)
    steps = []
    monkeypatch.setattr(
        "frostglass.networks.decoder.DecoderGame.step",
        lambda self, features, answers: steps.append(len(features)) or 0.0,
    )
    attacked(attack)
    learned = 3 * attack.steps_in(24)
    assert learned == 3 * 4  # 6 of 24 are held out, and the last batch takes what is left
    assert len(steps) == learned + attack.effort(5).steps
    assert attack.effort(5) == Effort(encoded=5, steps=2 if adapt else 0)
    assert attack.protects == adapt == Hybrid(starter={"adapt": adapt}).protects


def test_a_lesson_is_its_steps_its_validation_and_its_features():
    lesson = Mapper(epochs=10, batch=8, validation=0.2)
    seconds = feature_time.schooling_seconds(lesson, 100, 1.0, 0.01, (4, 8, 8))
    assert seconds == pytest.approx(10 * (80 // 8 + 20 / 8 / 3) + 100 * 2 * 0.01)
    large = (2**20, 16, 16)  # too many numbers to be kept: asked for in each epoch
    assert feature_time.schooling_seconds(
        replace(lesson, flips=False), 100, 0.0, 0.01, large
    ) == pytest.approx(10 * 100 * 0.01)


@pytest.mark.parametrize(
    "method",
    [
        Crafter(
            steps=3, inner_steps=4, terms=2, critic_steps=2, index_steps=5, first_steps=6, batch=4
        ),
        CrafterZ(steps=3, critic_steps=2, index_steps=5, first_steps=6, batch=4),
    ],
)
def test_what_crafting_does_is_counted(method, monkeypatch):
    made, encoder, pictures = (
        prior(),
        Counting().requires_grad_(False).eval(),
        torch.rand(10, *SHAPE, generator=torch.Generator().manual_seed(0)),
    )
    efforts = [often for _, often in method.efforts(encoder, pictures[:5], Assets(prior=made), 10)]
    done = Counter()
    descend, learn, slope = Inversion.descend, Judge.learn, type(method).slope

    def noted(kind, plain, amount):
        return lambda self, *given: (done.update({kind: amount(*given)}), plain(self, *given))[1]

    monkeypatch.setattr(
        Inversion,
        "descend",
        noted("descend", descend, lambda features, latents, steps, *_: steps * len(latents)),
    )
    monkeypatch.setattr(Judge, "learn", noted("learn", learn, lambda found, steps, rng: steps))
    monkeypatch.setattr(
        type(method), "slope", noted("slope", slope, lambda craft: len(craft.latents))
    )
    method.release(encoder, pictures, Assets(prior=made), seed=0, work=MemoryWork())
    assert efforts == [done["descend"] / 5, done["learn"], done["slope"] / 5]


@pytest.mark.parametrize("terms", [0, 2, 6, 7, 120])
def test_shorter_series_stand_for_a_long_one(terms):
    parts = Crafter(terms=terms).shorter()
    assert sum(weight * (5 + 3 * method.terms) for method, weight in parts) == pytest.approx(
        5 + 3 * terms
    )
    assert max(method.terms for method, _ in parts) <= 6


def test_nothing_is_crafted_in_no_steps():
    assert list(Crafter(steps=0).efforts(Counting(), torch.zeros(2, *SHAPE), Assets(), 2)) == []
    assert Crafter(steps=0).misfits((3, 17, 19), 1, None) == []


def test_pictures_without_content_are_told_apart_by_their_shape():
    blank = [Pictures.of(torch.empty(count, 3, 4, 4, device="meta")).key for count in (2, 2, 3)]
    assert blank[0] == blank[1] != blank[2]
    assert Pictures.of(torch.empty(2, 3, 4, 4, device="meta"), "public").key not in blank
    assert (
        Pictures.of(torch.zeros(2, 3, 4, 4), "public").key
        == Pictures.of(torch.zeros(2, 3, 4, 4)).key
    )
    assert Pictures.of(torch.zeros(2, 3, 4, 4)).key not in blank


# --- memory -------------------------------------------------------------------------------------------------------------------------------


ATTACKS = [
    {"name": "decoder", "variant": "gan", "perceptual": 1.0, "adapt": 8},
    {"name": "mapper", "averaged": 2, "flips": False},
    {"name": "latent", "start": "amortized", "adapt": 8},
    {"name": "hybrid", "starter": {"epochs": 500}},
]


def test_the_memory_of_every_attack_is_foreseen(tmp_path):
    values = TOY | {
        "defenses": [{**CRAFT, "steps": 100, "amortized": True}],
        "judging": {**TOY["judging"], "positive_control": False},
    }
    chosen = [
        (attack["name"], FeatureExperiment.parse(values | {"attack": attack})) for attack in ATTACKS
    ]
    found = foreseen(chosen, Store(tmp_path), counts_of, produce_features, FeatureRehearsal)
    assert found.unknown == ""
    assert found.bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_lesson_takes_the_memory_of_its_batches_and_of_the_features_that_are_kept(tmp_path):
    def peak(count, **changes):
        ledger = memory.Ledger()
        rehearsal = FeatureRehearsal(tmp_path, ledger, counts_of)
        public = replace(
            images(count, 4), pixels=torch.empty(count, *SHAPE, dtype=torch.uint8, device="meta")
        )
        module = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8 * 8 * 8, 2)).to(
            "meta"
        )
        target = Target(module, ("a", "b"), SHAPE, head="2", cut="0", attributes=True)
        with override_device(memory.META), ledger:
            rehearsal._lesson(
                Decoder(**{"width": 8, "batch": 64, **changes}), target, public, None, None
            )
        return ledger.peak

    feature = 8 * 8 * 8 * 4
    assert (
        peak(900, batch=256) - peak(900) > 190 * feature
    )  # a step keeps at least the features of each picture
    assert peak(9000) - peak(5000) == pytest.approx(
        4000 * 2 * feature, rel=0.5
    )  # mirrored ones too
    assert peak(9000, flips=False) < peak(9000)
