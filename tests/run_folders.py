"""Run folders of audits of models, written by the code that writes real ones."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from frostglass.auditing.controls import Evaluator, verdict
from frostglass.auditing.experiment import Experiment
from frostglass.auditing.products import ModelExposure
from frostglass.auditing.results import Audit, Trial
from frostglass.auditing.run import Run
from frostglass.auditing.run_folder import NUMBERS, write_run
from frostglass.auditing.thresholds import Fixed, Thresholds
from frostglass.core.types import Images, Reconstructions, Split, Target
from frostglass.evaluators.verifier import Verifier
from frostglass.metrics.base import Rows
from frostglass.report.arrange import group
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.study import Study
from frostglass.store.manifest import seal
from pages import Page

LIMITS = (0.5, 0.6)  # thresholds of a match at both false-accept rates

# Audits of models.
CALOR = [{"name": "calor", "rank": 3}]
SMOOTHING = [{"name": "label_smoothing"}]
BIDO = [{"name": "bido"}]
BROKEN = {"hits": (20, 19), "baseline": 1}
DEFENDED = {"defenses": CALOR, "hits": (8, 7), "baseline": 1, "accuracy": 0.967}
FAILED = {"control": (1, 1), "hits": (1, 1)}
KEDMI, BREPMI = {"name": "kedmi"}, {"name": "brepmi"}
STRAIGHT = {"name": "gmi", "straight_through": True}
STAGE = {
    "data": "public",
    "epochs": 12,
    "classes": 200,
    "accuracy": {"train": 1.0, "validation": 0.95, "test": 0.934},
}
FROZEN = {"last_frozen_layer": "features.6", "trainable": 345, "frozen": 12000}
TRANSFER = {
    **DEFENDED,
    "defenses": [{"name": "transfer"}],
    "seconds": 90.0,
    "info": {
        "trainable": 345,
        "first_stage": STAGE,
        "stage_seconds": 240.0,
        "facts": {"transfer": FROZEN},
    },
}


def bido(**settings: Any) -> dict[str, Any]:
    return {**DEFENDED, "defenses": [{"name": "bido", **settings}]}


def tried(case: str, hits: int, **more: Any) -> dict[str, Any]:
    """An attack on which both evaluators agree."""
    return {**BROKEN, "case": case, "hits": (hits, hits), **more}


def crossed(cases: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """Each attack on an undefended model and on CALoR, each stronger than the one before."""
    defended = [tried(case, 5 + place, defenses=CALOR, **more) for place, case in enumerate(cases)]
    return [*(tried(case, 12 + place % 8, **more) for place, case in enumerate(cases)), *defended]


def many_models(defenses: int = 8) -> list[dict[str, Any]]:
    """An undefended model and eight defenses at three strengths, some of them close together."""
    settings: list[list[dict[str, Any]]] = [
        [{"name": "mid", "weight": weight} for weight in (0.003, 0.01, 0.02)],
        [
            {"name": "bido", "measure": "hsic_nocco", "lambda_y": weight}
            for weight in (0.5, 1.0, 2.5)
        ],
        [
            {"name": "bido", "measure": "coco_frobenius", "lambda_x": weight}
            for weight in (5.0, 10.0, 15.0)
        ],
        [{"name": "label_smoothing", "alpha": alpha} for alpha in (-0.05, -0.1, -0.3)],
        [{"name": "transfer", "ratio": ratio} for ratio in (0.5, 0.6, 0.7)],
        [{"name": "calor", "rank": rank} for rank in (7, 5, 3)],
        [{"name": "dpsgd", "noise": noise} for noise in (0.5, 1.0, 2.0)],
        [{"name": "calor", "activation": "relu", "rank": rank} for rank in (7, 5, 3)],
    ]
    audits = [{**BROKEN, "accuracy": 0.96}]
    for place, strengths in enumerate(settings[:defenses]):
        for step, chosen in enumerate(strengths):
            hits = 18 - 2 * place - step
            audits.append(
                {
                    **BROKEN,
                    "defenses": [chosen],
                    "accuracy": 0.955 - 0.01 * step - 0.004 * place,
                    "hits": (hits, hits),
                }
            )
    return audits


def first_of(people: int, candidates: int, count: int) -> torch.Tensor:
    """Ones for the first `count` images, counted over all people, and zeros for the rest."""
    return (torch.arange(people * candidates) < count).float().reshape(people, candidates)


def model_rows(
    people: int, candidates: int, hits: Sequence[int], verified: Sequence[int], success: float
) -> Rows:
    """Rows in which the first `hits[N - 1]` images are top-1, and `verified[N - 1]` accepted."""
    columns = {
        "target_top1": first_of(people, candidates, round(success * people * candidates)),
        "target_confidence": torch.full((people, candidates), 0.5),
    }
    for place, count in enumerate(hits, 1):
        columns[f"top1_{place}"] = first_of(people, candidates, count)
        columns[f"top5_{place}"] = first_of(people, candidates, count + 1)
    columns |= verified_columns(people, candidates, verified)
    far = torch.linspace(0.2, 0.3, people * candidates).reshape(people, candidates)
    columns |= {"distance": far, "distance_squared": far**2, "manifold": far}
    return Rows(torch.arange(people), columns)


def verified_columns(
    people: int, candidates: int, verified: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Columns of each evaluator N, which accepts the first `verified[N - 1]` images.

    Matches fall from 0.95 to 0.65 where it accepts, and from 0.45 to 0.05 where it does not.
    """
    columns, falling = {}, torch.linspace(1, 0, people * candidates).reshape(people, candidates)
    for place, count in enumerate(verified, 1):
        accepted = first_of(people, candidates, count)
        match = torch.where(accepted > 0, 0.65 + 0.3 * falling, 0.05 + 0.4 * falling)
        columns[f"verified_{place}"] = (match > LIMITS[0]).float()
        columns[f"strict_{place}"] = (match > LIMITS[1]).float()
        columns[f"match_{place}"] = match
    return columns


def verifier_of(accepts: float = 0.98, rates: Sequence[float] = (0.01, 0.001)) -> Verifier:
    """A verifier as it is calibrated on many images."""
    return Verifier(
        torch.zeros(2),
        torch.zeros(2, 2),
        torch.arange(2),
        rates=torch.tensor(rates),
        thresholds=torch.tensor(LIMITS),
        true_accepts=torch.tensor([accepts, accepts - 0.1]),
        impostor_share=torch.tensor([0.011, 0.0012]),
        genuine=160,
        comparisons=40_000,
        impostors=1000,
    )


def network(model: str, accuracy: float, key: str, classes: Sequence[str], **more: Any) -> Target:
    info = {"model": model, "parameters": 12345, "accuracy": {"test": accuracy}}
    info |= {"selected_epoch": 3, "history": [], "seconds": 60.0, **more.pop("info", {})}
    return Target(nn.Identity(), tuple(classes), (3, 8, 8), "head", info=info, key=key, **more)


def fixed(limits: dict[str, float] | None, before: bool = True) -> Fixed | None:
    """Thresholds as a run records them."""
    if limits is None:
        return None
    return Fixed(Thresholds(**limits).limits, "2026-01-02T03:04:05+00:00", before)


def marked(images: Images, attributes: dict[str, list[bool]] | None) -> Images:
    """Images with an attribute of each person."""
    if not attributes:
        return images
    values = torch.tensor([*attributes.values()]).T[images.labels]
    return replace(images, attributes=values, attribute_names=tuple(attributes))


def split_of(images: Images) -> Split:
    facts = {"images": len(images), "sha256": "5e" * 32}
    manifest = {"parts": {"train": facts, "test": {"images": 240, "sha256": "5e" * 32}}}
    return Split(images, images, images, images, manifest, key="split")


def experiment_of(name: str, spec: dict[str, Any], **more: Any) -> Experiment:
    chosen = {"name": name, "case": spec.get("case", ""), "defenses": spec.get("defenses", [])}
    return Experiment.parse(chosen | more)


def evaluators_of(
    accuracies: Sequence[float],
    names: Sequence[str],
    *,
    embedder: str | None = "faces32",
    accepts: Sequence[float] = (),
    rates: Sequence[float] = (0.01, 0.001),
) -> tuple[Evaluator, ...]:
    """Classifiers with these accuracies, and an embedder, each with its verifier."""
    networks = [
        network("resnet", accuracy, f"evaluator{place}:{accuracy}", names)
        for place, accuracy in enumerate(accuracies)
    ]
    if embedder:
        networks.append(network(embedder, 0.0, f"embedder:{embedder}", ()))
    accepts = tuple(accepts) or (0.98,) * len(networks)
    return tuple(
        (each, verifier_of(share, rates)) for each, share in zip(networks, accepts, strict=True)
    )


def defense_label(spec: dict[str, Any]) -> str:
    return " + ".join(d["name"] for d in spec.get("defenses", [])) or "undefended"


def random_pixels(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)


def make_run(
    folder: Path,
    audits: Sequence[dict[str, Any]],
    *,
    people: int = 20,
    candidates: int = 1,
    names: Sequence[str] = (),
    size: int = 8,
    evaluators: Sequence[float] = (0.97, 0.95),
    settings: dict[str, Any] | None = None,
    name: str = "trial",
    private: torch.Tensor | None = None,
    thresholds: dict[str, float] | None = None,
    before: bool = True,
    attributes: dict[str, list[bool]] | None = None,
    failed: Sequence[str] = (),
    not_run: Sequence[str] = (),
    **verifiers: Any,
) -> Path:
    """Write a run folder of audits of models, with an embedder after the classifiers.

    Each audit may set `defenses`, `hits` (top-1 of each classifier, in images; it accepts the
    same), `verified` (images the embedder accepts; the fewest hits by default), `accuracy`,
    `loss`, `success`, `baseline` (images of the prior-only baseline that are top-1 and
    accepted), `control` (hits in the positive control, None for no control, "itself" for the
    trial), `model`, `seed`,
    `far` (manifold ratio), `images`, `recipe` (settings of the training), `seconds` (of the
    training; the undefended one takes 60), `info` (more about the target), `case`, `attack`
    (instead of GMI), `steps` (of each search), `partial` (places of people whose search
    stopped early) and `embedder` (False for data without one).
    """
    names = tuple(names) or tuple(f"person {place}" for place in range(people))
    rng = torch.Generator().manual_seed(1)
    private = random_pixels(rng, people, 3, size, size) if private is None else private
    images = Images(private, torch.arange(people), names, tuple(names))
    split = split_of(marked(images, attributes))
    networks = evaluators_of(evaluators, names, **verifiers)
    results = []
    for place, spec in enumerate(audits):
        drawn = torch.rand((people, candidates, 3, size, size), generator=rng)
        made = spec.get("images", drawn)
        own = networks if spec.get("embedder", True) else networks[: len(evaluators)]
        results.append(_model_audit(f"{name}{place}", spec, made, split, own))
    labels = tuple(map(defense_label, audits))
    settings = {"name": name} if settings is None else settings
    run = Run(
        name, settings, labels, tuple(results), failed=tuple(failed), not_run=tuple(not_run),
        date="2026-01-03T10:20:30+00:00", thresholds=fixed(thresholds, before),
    )  # fmt: skip
    return write_run(run, folder)


def _model_audit(
    name: str,
    spec: dict[str, Any],
    images: torch.Tensor,
    split: Split,
    evaluators: tuple[Evaluator, ...],
) -> Audit:
    people, candidates = images.shape[:2]
    classifiers = sum(bool(each.classes) for each, _ in evaluators)
    every = (people * candidates,) * classifiers

    def rows(hits: Sequence[int], success: float, verified: int | None = None) -> Rows:
        hits = tuple(hits)[:classifiers]
        least = min(hits) if verified is None else verified
        accepted = (*hits, *[least] * (len(evaluators) - classifiers))
        return model_rows(people, candidates, hits, accepted, success)

    own = rows(spec.get("hits", every), spec.get("success", 1.0), spec.get("verified"))
    far = own.columns["manifold"] * spec.get("far", 1.0)
    own = replace(own, columns={**own.columns, "manifold": far}, key=name)
    zeros = torch.zeros(people, candidates)
    marks: dict[str, Any] = {}
    if "steps" in spec:
        marks["steps"] = torch.tensor(spec["steps"])
    if "partial" in spec:
        marks["partial"] = torch.tensor([place in spec["partial"] for place in range(people)])
    people_attacked = torch.arange(people)
    result = Reconstructions(images, people_attacked, zeros, zeros, 31_200, 75.5, name, **marks)
    model, names = spec.get("model", "cnn"), split.classes
    attack = {"name": "gmi", "loss": spec.get("loss", "margin"), "keep": 1}
    recipe = {"model": model, **spec.get("recipe", {})}
    more = {"seed": spec.get("seed", 0), "target": recipe, "attack": spec.get("attack", attack)}
    experiment = experiment_of("trial", spec, **more)
    info = {"trainable": 12345, "seconds": spec.get("seconds", 60.0), **spec.get("info", {})}
    target = network(model, spec.get("accuracy", 0.982), f"target{name}", names, info=info)
    prior: Any = SimpleNamespace(info={"method": {"name": spec.get("prior", "wgan")}}, key="prior")
    baseline = rows([spec.get("baseline", 0)] * classifiers, 0.0)
    trial, control = Trial(ModelExposure(target), prior, result, result, own, baseline), None
    if spec.get("control") == "itself":
        control = trial
    elif spec.get("control", ()) is not None:
        undefended = ModelExposure(network(model, 0.982, "undefended", names))
        hits = rows(spec.get("control", every), 1.0)
        control = replace(trial, exposure=undefended, rows=hits)
    controls = verdict(experiment, trial, control, evaluators=evaluators, references=None)
    networks, verifiers = zip(*evaluators, strict=True)
    return Audit(
        experiment=experiment, split=split, evaluators=networks, verifiers=verifiers, embedder=None,
        trial=trial, control=control, controls=controls,
    )  # fmt: skip


def edit_run(run: Path, document: dict[str, Any]) -> None:
    """Write another run.json, with the hashes of a run that measured it."""
    (run / "run.json").write_text(json.dumps(document))
    reseal(run)


def reseal(run: Path) -> None:
    seal(run, NUMBERS)


def page_of(tmp_path: Path, audits: Sequence[dict[str, Any]], **options: Any) -> Page:
    """The report of one run of models."""
    run = make_run(tmp_path / "run", audits, **options)
    return Page(build_report([run], tmp_path / "report.html"))


def sentences(tmp_path: Path, audits: Sequence[dict[str, Any]], **options: Any) -> list[str]:
    return page_of(tmp_path, audits, **options).sentences


def study_of(tmp_path: Path, audits: Sequence[dict[str, Any]], **options: Any) -> Study:
    (study,) = group([read_run(make_run(tmp_path / "run", audits, **options))])
    return study
