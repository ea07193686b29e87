"""Audit a model of your own in Python: any module that maps images in [0, 1] to logits.

Here "your model" is a small network for a dozen procedural faces: replace it and the data by yours.
Run it with `python examples/audit_your_model.py`; it takes about two minutes.
"""

import frostglass as fg
from frostglass.attacks import Gmi
from frostglass.data import Faces
from frostglass.metrics import Accuracy
from frostglass.priors import Pretrained


def main(people: int = 12, steps: int = 120) -> float:
    data = Faces(identities=people, images=60, public_identities=200, public_images=1)
    split = fg.make_split(data, test_fraction=0.2, validation_fraction=0.1, seed=0)
    model = fg.train_target(fg.Training(model="cnn", epochs=20, lr=2e-3), split).module  # yours
    target = fg.wrap(model, classes=split.classes, image_shape=split.train.shape)
    target = fg.examine(target, split)  # is it the model that was meant?
    settings = fg.Training(model="resnet", options={"width": 16, "depth": 1}, epochs=24, lr=3e-3)
    evaluator = fg.train_target(settings, split)

    prior = Pretrained(weights="faces32").train(split.public)
    search = {"optimizer": "adam", "lr": 0.05, "weight": 1, "critic_weight": 0.05, "coupling": 1}
    attack = Gmi.variant("margin", **search, clamp=0, steps=steps, pool=1000, candidates=2, keep=1)
    result = fg.invert(attack, target.view(attack.access), fg.Assets(prior=prior), seed=0)
    baseline = fg.prior_only(prior, range(people), 1, seed=0)

    reconstructed, chance = (
        fg.measure([Accuracy()], fg.Evidence(each, target, [evaluator], split)).score("top1_1")
        for each in (result, baseline)
    )
    print(f"{evaluator} recognises {reconstructed}; prior-only baseline: {chance}")
    return reconstructed.value - chance.value


if __name__ == "__main__":
    main()
