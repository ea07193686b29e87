"""A dry run knows the images that only evaluators train on."""

import tomllib

from commands import TOY
from frostglass.auditing.experiment import Fractions, experiments
from frostglass.data.faces import Faces
from frostglass.plan.brief import blank_split
from frostglass.plan.estimate import dry_run
from frostglass.store.store import Store

DATA = Faces(size=16, identities=4, images=8, public_identities=6, public_images=1)


def test_a_blank_split_has_the_images_of_evaluators():
    split = blank_split(DATA, Fractions(test=0.25, validation=0.125, evaluators=0.375))
    sizes = [len(part) for part in (split.train, split.validation, split.test, split.evaluators)]
    assert sizes == [8, 4, 8, 12]
    assert len(split.known_to_evaluators) == 20
    assert blank_split(DATA, Fractions(test=0.25, validation=0.125)).evaluators is None


def test_evaluators_are_planned_on_their_images_and_the_target_on_its_own(tmp_path):
    config = tomllib.loads(TOY)
    config["split"] = {"test": 0.25, "validation": 0.125, "evaluators": 0.375}
    steps, unknown = dry_run(experiments(config), Store(tmp_path))
    assert unknown == ""
    works = [step.work for _, _, step in steps if step.title.startswith("target")]
    assert works == ["1 epochs × 20 images", "1 epochs × 20 images", "2 epochs × 8 images"]
