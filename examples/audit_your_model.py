"""Audit a model of your own in Python: any module that maps images in [0, 1] to logits.

Here "your model" is a small network for a dozen procedural faces: replace it and the data by yours.
Run it with `python examples/audit_your_model.py`; it takes about two minutes.
"""

import frostglass as fg
from frostglass.attacks import Gmi
from frostglass.data import Faces
from frostglass.metrics import Verification
from frostglass.priors import Pretrained


def main(people: int = 12, steps: int = 150) -> float:
    data = Faces(identities=people, images=60, public_identities=200, public_images=1)
    split = fg.make_split(data, test_fraction=0.2, validation_fraction=0.1, seed=0)
    model = fg.train_target(fg.Training(model="cnn", epochs=20, lr=2e-3), split).module  # yours
    target = fg.wrap(model, classes=split.classes, image_shape=split.train.shape)
    target = fg.examine(target, split)  # is it the model that was meant?
    # A face verifier that never saw these people; for photos: source="dlib", or a network of yours.
    evaluator = fg.read_embedder(fg.Embedder(source="faces32"), split.train.shape)

    prior = Pretrained(weights="faces32").train(split.public)
    search = {"optimizer": "adam", "lr": 0.05, "weight": 1, "critic_weight": 0.05, "coupling": 1}
    attack = Gmi.variant("margin", **search, clamp=0, steps=steps, pool=3000, candidates=3, keep=1)
    result = fg.invert(attack, target.view(attack.access), fg.Assets(prior=prior), seed=0)
    baseline = fg.prior_only(prior, range(people), 1, seed=0)

    reconstructed, chance = (
        fg.measure([Verification()], fg.Evidence(each, target, [evaluator], split))
        for each in (result, baseline)
    )
    shares = [rows.score("verified_1") for rows in (reconstructed, chance)]
    print(f"recognised, at a false-accept rate of 1 %: {shares[0]}; prior only: {shares[1]}")
    return shares[0].value - shares[1].value


if __name__ == "__main__":
    main()
