"""The false alarm of a prior from another distribution: high top-1, low verification, and named.

The prior learned from public people of another style, and not for long: its faces are blurred. The
attack still finds images that a classifier of 20 people assigns to the attacked person,
because one of them must win. A verifier that never saw the people does not accept them.

The settings were found on these people, and the flag is not certain on others. Of three worlds
tried it was raised in this one (top-1 75 %, verified 15 %). It was not with 20 people from 6000
(verified 15 %, the gap not significant) nor with 32 from 7000 (top-1 34 %, verified 16 %).
"""

import pytest

from frostglass.auditing.run import Run, run_all
from frostglass.auditing.run_folder import write_run
from frostglass.report.build import build_report
from frostglass.store.store import Store
from pages import Page

pytestmark = pytest.mark.slow

WORLD = {
    "name": "false-alarm",
    "data": {
        "name": "faces",
        "size": 32,
        "identities": 20,
        "images": 40,
        "first_identity": 5000,
        "public_identities": 1000,
        "public_images": 2,
        "public_style": "other",
    },
    "target": {"options": {"width": 16}, "epochs": 20, "lr": 2e-3, "weight_decay": 1e-3},
    "evaluators": [
        {
            "model": "resnet",
            "options": {"width": 16, "depth": 1},
            "epochs": 20,
            "lr": 3e-3,
            "weight_decay": 1e-3,
        },
        {"kind": "embedder", "source": "faces32"},
    ],
    "prior": {
        "name": "wgan",
        "width": 12,
        "critic_width": 16,
        "critic_steps": 2,
        "batch": 32,
        "lr": 1e-3,
        "average": 0.98,
        "cooldown": 0.3333,
        "steps": 400,
    },
    "attack": {
        "name": "gmi",
        "loss": "margin",
        "optimizer": "adam",
        "lr": 0.05,
        "steps": 100,
        "weight": 1.0,
        "critic_weight": 0.02,
        "coupling": 1,
        "clamp": 0.0,
        "pool": 1000,
        "candidates": 2,
        "keep": 1,
        "batch": 64,
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return run_all(WORLD, Store(tmp_path_factory.mktemp("store")))


def test_classifiers_name_the_person_and_a_verifier_does_not(run):
    (audit,) = run.audits
    assert audit.controls.deciding == "verified_2"
    assert audit.verifiers[1].true_accepts[0] > 0.8  # a good verifier, on real images
    named = audit.rows.score("top1_1").value
    verified = audit.rows.score("verified_2").value
    assert named >= 0.5
    assert verified <= named / 2


def test_the_verdict_and_the_report_name_it(run, tmp_path):
    (audit,) = run.audits
    assert audit.controls.fooled
    assert any("the classifiers are fooled" in warning for warning in audit.controls.warnings)
    page = Page(build_report([write_run(run, tmp_path / "run")], tmp_path / "report.html"))
    assert any("The classifiers are fooled" in sentence for sentence in page.sentences)
