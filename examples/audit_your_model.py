"""Audit a model of your own in Python: any module that maps images in [0, 1] to logits.

Here "your model" is a small network trained on a dozen procedural faces; replace `your_model` and the data by yours. Run it with
`python examples/audit_your_model.py`; it takes about two minutes.
"""

import torch
from torch import nn

from frostglass import invert, make_split, wrap
from frostglass.attacks.base import prior_only
from frostglass.attacks.model.gmi import Gmi
from frostglass.data.faces import Faces
from frostglass.metrics.accuracy import Accuracy
from frostglass.metrics.base import Evidence, measure
from frostglass.priors.pretrained import Pretrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training


def your_model(split) -> nn.Module:
    """Any training code: this one knows nothing of frostglass."""
    torch.manual_seed(0)
    stage = lambda i, o: (nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())  # noqa: E731
    model = nn.Sequential(
        *stage(3, 32),
        *stage(32, 64),
        *stage(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, len(split.classes)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(20):
        for index in torch.randperm(len(split.train)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(split.train.floats(index)), split.train.labels[index]
            ).backward()
            optimizer.step()
    return model


def main(people: int = 12, steps: int = 120) -> float:
    split = make_split(
        Faces(identities=people, images=60, public_identities=200, public_images=1),
        test_fraction=0.2,
        validation_fraction=0.1,
        seed=0,
    )
    target = wrap(your_model(split), classes=split.classes, image_shape=split.train.shape)
    prior = Pretrained(weights="faces32").train(split.public)
    judge = train_target(
        Training(model="resnet", options={"width": 16, "depth": 1}, epochs=24, lr=3e-3), split
    )

    attack = Gmi(
        loss="margin",
        optimizer="adam",
        lr=0.05,
        steps=steps,
        weight=1,
        critic_weight=0.05,
        coupling=1,
        clamp=0,
        pool=1000,
        candidates=2,
        keep=1,
    )
    found = invert(attack, target.view(attack.access), prior, seed=0)
    blind = prior_only(prior, range(people), 1, seed=0)

    rebuilt, guessed = (
        measure([Accuracy()], Evidence(pictures, target, [judge], split)).score("top1_1")
        for pictures in (found, blind)
    )
    print(
        f"the judge, right on {judge.info['accuracy']['test']:.0%} of held-out pictures, recognises"
    )
    print(
        f"  {rebuilt.value:.0%} of the rebuilt people (95 % interval {rebuilt.low:.0%} to {rebuilt.high:.0%})"
    )
    print(
        f"  {guessed.value:.0%} of blind draws from the same prior ({guessed.low:.0%} to {guessed.high:.0%})"
    )
    return rebuilt.value - guessed.value


if __name__ == "__main__":
    main()
