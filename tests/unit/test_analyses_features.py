"""Analyses of features, gradients and audits against closed forms and slow references."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from frostglass.analyses._audits import log_likelihood, method_label, scored_curve, vacuous_notes
from frostglass.analyses._descent import Search
from frostglass.analyses.adaptive_epochs import length_of
from frostglass.analyses.base import Context, unfit
from frostglass.analyses.bottleneck import Bottleneck, linear_errors, reconstruction_error
from frostglass.analyses.checkpoints import Checkpoints
from frostglass.analyses.confidence import mean_confidence, success_by_confidence
from frostglass.analyses.fisher import Fisher
from frostglass.analyses.gradients import Gradients, image_gradients
from frostglass.analyses.layer_dependence import LayerDependence
from frostglass.analyses.lda_layers import groups_of, layer_outputs
from frostglass.analyses.likelihood import ordering, shares_in_bins
from frostglass.analyses.rank_sweep import RankSweep, head_rank
from frostglass.analyses.server_training import ServerTraining, answers, spread
from frostglass.analyses.tsne import Tsne, agreement_of_chance, neighbour_agreement
from frostglass.analyses.unilateral import Unilateral, image_weight, output_dependence
from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError, DataError, RunError
from frostglass.core.types import Images
from frostglass.defenses.training.bido import Bido
from frostglass.defenses.training.calor import Calor, LowRankHead
from frostglass.metrics._stats import interval
from frostglass.metrics.base import Score, outputs
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import SHAPE, linear_world, rng, split, target


def images(count: int = 12, people: int = 4) -> Images:
    pixels = torch.randint(0, 256, (count, *SHAPE), generator=rng(3), dtype=torch.uint8)
    labels = torch.arange(count) % people
    names = tuple(f"person {i}" for i in range(people))
    attributes = (torch.arange(count) < count // 2)[:, None]
    return Images(pixels, labels, names, ("",) * count, attributes, ("beard",))


def parsed(**settings):
    return [experiment for _, experiment in experiments(settings)]


def test_the_gradient_of_a_linear_softmax_model_has_its_closed_form():
    """The gradient of -ln p_y in the image is Wᵀ (p - e_y)."""
    model, prior = linear_world()
    labels = torch.tensor([0, 1, 2, 1])
    points = torch.rand(4, 1, 1, 5, generator=rng(), dtype=torch.double)
    weight = model.module[1].weight
    expected = (model.module(points).softmax(1) - F.one_hot(labels, 3)) @ weight
    found = image_gradients(Search(model, prior, labels), points)
    torch.testing.assert_close(found, expected.norm(dim=1).detach())


def test_the_gradient_through_a_tanh_head_has_its_closed_form():
    """Cᵀ_A diag(1 - t²) Cᵀ_B (p - e_y), which vanishes as tanh saturates."""
    model, prior = linear_world()
    norms = []
    for scale in (1.0, 30.0):
        torch.manual_seed(0)
        head = LowRankHead(5, 2, 3, activation="tanh", gain=1.0, pre_norm=False).double()
        head.compress.weight.data *= scale
        model.module[1] = head
        labels = torch.tensor([0, 1, 2])
        points = torch.rand(3, 1, 1, 5, generator=rng(), dtype=torch.double)
        squashed = torch.tanh(head.compress(points.flatten(1)))
        slope = (head(points.flatten(1)).softmax(1) - F.one_hot(labels, 3)) @ head.expand.weight
        expected = ((slope * (1 - squashed.square())) @ head.compress.weight).norm(dim=1)
        found = image_gradients(Search(model, prior, labels), points)
        torch.testing.assert_close(found, expected.detach())
        norms.append(found.mean())
    assert norms[1] < norms[0]


def test_the_best_linear_autoencoder_leaves_the_smaller_singular_values():
    data = torch.randn(30, 6, generator=rng(), dtype=torch.double)
    values = torch.linalg.svdvals(data - data.mean(0))
    ranks = [1, 3, 6]
    expected = [values[rank:].square().sum().item() / data.numel() for rank in ranks]
    assert linear_errors(data, data, ranks) == pytest.approx(expected, abs=1e-12)
    random = torch.linalg.qr(torch.randn(6, 3, generator=rng(1), dtype=torch.double))[0].T
    rest = data - data.mean(0)
    assert expected[1] <= (rest - rest @ random.T @ random).square().mean()


@pytest.mark.slow
def test_an_autoencoder_learns_flat_images():
    shades = torch.arange(0, 256, 16, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    flat = Images(shades.contiguous(), torch.zeros(16, dtype=torch.long), ("x",), ("",) * 16)
    short = Bottleneck(ranks=(1, 2), steps=1, width=2, batch=16)
    long = Bottleneck(ranks=(1, 2), steps=12, width=2, batch=16, lr=0.02)
    errors = [reconstruction_error(each.trained(flat, 1, 0), flat) for each in (short, long)]
    assert errors[1] < errors[0]


def test_neighbours_agree_as_a_loop_counts_them():
    features = torch.randn(15, 3, generator=rng())
    groups = torch.arange(15) % 2
    total = 0
    for place in range(15):
        apart = (features - features[place]).norm(dim=1)
        nearest = [each for each in apart.argsort().tolist() if each != place][:4]
        total += sum(groups[each] == groups[place] for each in nearest)
    assert neighbour_agreement(features, groups, 4) == pytest.approx(total / 60)


def test_neighbours_of_separate_clusters_all_agree_and_random_ones_do_as_chance():
    groups = torch.arange(400) % 2
    clusters = torch.randn(400, 2, generator=rng()) + 50 * groups[:, None]
    assert neighbour_agreement(clusters, groups, 5) == 1.0
    noise = torch.randn(400, 2, generator=rng())
    assert abs(neighbour_agreement(noise, groups, 5) - agreement_of_chance(groups)) < 0.1
    assert agreement_of_chance(torch.tensor([0, 0, 1])) == pytest.approx(1 / 3)
    with pytest.raises(RunError, match="not finite"):
        neighbour_agreement(noise * torch.nan, groups, 5)
    with pytest.raises(DataError, match="expected less than 400 images"):
        neighbour_agreement(noise, groups, 400)


def test_a_server_learns_from_features_that_a_protection_turned_around():
    """What a protection does to every feature alike, a server that learns from them undoes."""
    plain = torch.randn(300, 4, 2, generator=rng())
    truth = (plain.flatten(1)[:, :3] > 0).float()
    server = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 3))
    method = ServerTraining(epochs=30, batch=32, lr=0.05)
    method.train(server, -plain[:200], truth[:200], seed=0)
    first = answers(server, -plain[200:])
    assert (((first > 0) == (truth[200:] > 0)).float().mean()) > 0.9
    assert (((answers(server, plain[200:]) > 0) == (truth[200:] > 0)).float().mean()) < 0.2
    assert not server.training
    again = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 3))
    again.load_state_dict(server.state_dict())
    for each in (server, again):
        method.train(each, -plain[:200], truth[:200], seed=1)
    assert torch.equal(answers(server, plain), answers(again, plain))
    nothing = torch.nn.Identity()  # behind the last layer
    method.train(nothing, -plain[:200], truth[:200], seed=0)
    assert len(spread(images(12), 5)) == 5
    assert len(spread(images(12), 50)) == 12


def test_layers_are_read_in_chunks_and_grouped():
    held, model = images(70), target().module.eval()
    whole = target()
    found = layer_outputs(whole, held, ("0",))["0"]
    assert found.shape == (70, 8 * 8 * 8)
    torch.testing.assert_close(found[65], model[0](held.floats(slice(65, 66))).flatten().detach())
    assert groups_of(held, "person").equal(held.labels)
    assert groups_of(held, "beard").sum() == 35
    with pytest.raises(DataError, match=r"person or an attribute of the data \(beard\), got 'hat'"):
        groups_of(held, "hat")


def test_likelihood_shares_and_order():
    logits = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    found = log_likelihood(logits, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(0.5), -30.0])
    edges = torch.tensor([-3.0, -2.0, -1.0, 0.0])
    shares = shares_in_bins(torch.tensor([-3.0, -2.0, -0.5, 0.0]), edges)
    assert shares.tolist() == [0.25, 0.25, 0.5]
    assert ordering(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0])) == 3.5 / 4
    assert ordering(torch.tensor([]), torch.tensor([1.0])) is None
    with pytest.raises(ConfigError, match="NaN"):
        ordering(torch.tensor([torch.nan]), torch.tensor([1.0]))


def test_bins_of_confidence_have_equal_counts_and_their_own_means():
    confidence, success = torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    low, high = success_by_confidence(confidence, success, 2)
    assert low[:3] == pytest.approx((0.15, 2, 0.0))
    assert high[:3] == pytest.approx((0.85, 2, 0.5))
    assert high[3:] == interval(torch.tensor([0.0, 1.0]))


def test_mean_confidence_is_that_of_the_true_class():
    held, model = images(), target()
    logits, _ = outputs(model, held)
    expected = [logits[i].softmax(0)[held.labels[i]].item() for i in range(len(held))]
    assert mean_confidence(model, held) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_dependence_of_outputs_agrees_with_its_definition():
    """COCO in the Frobenius norm: √‖H K H · H L H‖ / m with Gaussian kernels of width 5 √d."""
    held, model = images(12), target()
    logits, _ = outputs(model, held)
    total = 0.0
    for part in (slice(0, 6), slice(6, 12)):
        grams = []
        for values in (held.floats(part).flatten(1).double(), logits[part].double()):
            apart = torch.cdist(values, values).square() / (50 * values.shape[1])
            centre = torch.eye(6, dtype=torch.double) - 1 / 6
            grams.append(centre @ (-apart).exp() @ centre)
        total += math.sqrt((grams[0] @ grams[1]).norm().item()) / 6
    found = output_dependence(model, held, "coco_frobenius", 6)
    assert found == pytest.approx(total / 2, rel=1e-3)
    with pytest.raises(ConfigError, match="expected at most 12, the held-out images, got 64"):
        output_dependence(model, held, "coco_frobenius", 64)


def test_methods_are_named_by_what_differs_from_the_defaults():
    assert method_label(Calor()) == "CALoR"
    assert method_label(Calor(rank=5, b=2.0), without=("b",)) == "CALoR (rank=5)"


def test_audits_that_prove_nothing_are_named():
    def subject(label, reason):
        return SimpleNamespace(
            label=label, audit=SimpleNamespace(controls=SimpleNamespace(vacuous=reason))
        )

    notes = vacuous_notes([subject("a", "it failed"), subject("b", "")])
    assert notes == ("VACUOUS: a: it failed",)


def test_curves_of_scores_are_in_order():
    def score(value):
        return Score("s", value, value - 0.1, value + 0.1, (value,))

    points = [(2.0, score(0.5)), (1.0, score(0.7))]
    assert scored_curve("c", points).x == (1.0, 2.0)
    assert scored_curve("c", points, by_x=False).y == (0.5, 0.7)
    assert scored_curve("c", points).low == pytest.approx((0.6, 0.4))


CONSTANT = {"schedule": "constant", "keep": "last"}
TRANSFER = [{"name": "transfer", "ratio": 0.5}]
CUT = {"cut": "stage1", "attributes": ["all"]}
RANKS = [[{"name": "calor", "rank": 2}], [{"name": "calor", "rank": 4}], []]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Checkpoints(), {"target": CONSTANT}, "expected several checkpoints"),
        (
            Checkpoints(),
            {"grid": {"target.epochs": [1, 2]}},
            "target.schedule: expected 'constant'",
        ),
        (
            Checkpoints(),
            {"target": CONSTANT, "grid": {"target.epochs": [1, 2]}, "defenses": TRANSFER},
            "transfer: expected epochs",
        ),
        (RankSweep(), {}, "expected several ranks of calor"),
        (Unilateral(), {}, "expected bido with several lambda_x"),
        (
            Unilateral(),
            {"grid": {"defenses": [[{"name": "bido", "lambda_x": x}] for x in (1.0, 2.0)]}},
            "bido.lambda_y: expected 0",
        ),
        (Gradients(people=99), {"data": {"name": "faces"}}, "people: expected at most"),
        (
            Fisher(people=2),
            {"data": {"name": "faces", "public_images": 1}},
            "the perceptual network learns public people",
        ),
        (Tsne(attribute="wings"), {}, "attribute: expected one of the data's"),
    ],
)
def test_configs_that_do_not_suit_an_analysis_are_refused(method, settings, message):
    assert message in unfit(method, parsed(**settings))[0]


def test_configs_that_suit_an_analysis_are_accepted():
    grid = {"target": CONSTANT, "grid": {"target.epochs": [1, 2]}}
    assert unfit(Checkpoints(), parsed(**grid)) == []
    fixed = [{**TRANSFER[0], "epochs": 2}]
    assert unfit(Checkpoints(), parsed(**grid, defenses=fixed)) == []
    assert unfit(RankSweep(), parsed(grid={"defenses": RANKS})) == []
    assert [head_rank(each) for each in parsed(grid={"defenses": RANKS})] == [2, 4, 0]


def test_few_epochs_are_the_beginning_of_many():
    """What makes grid.target.epochs a list of checkpoints."""
    recipe = {"options": {"width": 4}, "batch": 16, **CONSTANT}
    data = split()
    short, long = (train_target(Training(epochs=count, **recipe), data) for count in (1, 2))
    assert long.info["history"][0] == pytest.approx(short.info["history"][0], rel=1e-5)
    assert short.info["selected_epoch"] == 0
    assert long.info["selected_epoch"] == 1


def test_how_long_an_attack_adapts():
    attack = {"name": "decoder", "adapt": 8, "adapt_epochs": 5}
    (adaptive,) = parsed(target=CUT, attack=attack)
    (plain,) = parsed(target=CUT, attack={"name": "decoder"})
    assert (length_of(adaptive), length_of(plain)) == (5, 0)


def test_weights_of_unilateral_terms():
    (one,) = parsed(defenses=[{"name": "bido", "lambda_x": 3.0, "lambda_y": 0.0}])
    assert image_weight(one) == 3.0
    assert image_weight(SimpleNamespace(defenses=())) == 0


def test_dependence_of_layers_stands_side_by_side():
    """The rows of each model are what BiDO measures of it."""
    parts = split()
    models = [target(), target(seed=1)]
    models = [replace(model, taps=("2", "5")) for model in models]
    subjects = tuple(
        SimpleNamespace(label=label, target=model, split=parts, experiment=SimpleNamespace(seed=0))
        for label, model in zip(("undefended", "bido"), models, strict=True)
    )
    result = LayerDependence().run(Context(subjects))
    (table,) = result.tables
    expected = [
        (subject.label, name, pair["d_x"], pair["d_y"])
        for subject in subjects
        for name, pair in Bido().dependence(subject.target, parts.train, seed=0).items()
    ]
    assert list(table.rows) == expected
    assert [curve.name for curve in result.figures[0].curves] == ["undefended", "bido"]
