"""Run folders of audits of features, written by the code that writes real ones."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from frostglass.auditing.controls import Evaluator, verdict
from frostglass.auditing.products import FeatureExposure, Released
from frostglass.auditing.results import Audit, Trial
from frostglass.auditing.run import Run
from frostglass.auditing.run_folder import write_run
from frostglass.core.types import Images, Reconstructions, Target
from frostglass.metrics.base import Rows
from frostglass.report.arrange import group
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.study import Study
from pages import Page
from run_folders import (
    defense_label,
    evaluators_of,
    experiment_of,
    first_of,
    fixed,
    marked,
    network,
    random_pixels,
    split_of,
    verified_columns,
)

SHAPE = (32, 16, 16)
CRAFTER, DISCO = [{"name": "crafter"}], [{"name": "disco"}]
LATENT, ADAPTED = {"name": "latent", "tries": 1}, {"name": "decoder", "adapt": 64}
OPEN = {"similarity": 0.6, "mcc": 0.61, "auc": 0.85}
CRAFTED = {"defenses": CRAFTER, "similarity": 0.3, "mcc": 0.53, "auc": 0.8}
WEAK = {"similarity": 0.06, "control": 0.06}
NOTED = (
    {"images": 3, "emd_start": 2.0, "emd_end": 0.5, "steps": 100},
    {"images": 1, "emd_start": 4.0, "emd_end": 1.5, "steps": 60},
)


def feature_rows(level: float, people: int, candidates: int, evaluators: int, hits: int) -> Rows:
    """Rows with mean similarity `level`: people differ by up to 0.06, candidates by up to 0.02.

    The last evaluator is an embedder; all of them accept the first `hits` images.
    """
    each = torch.linspace(-0.03, 0.03, people).double()[:, None]
    each = each + torch.linspace(-0.01, 0.01, candidates).double()
    similarity, flat = level + each - each.mean(), torch.ones(people, candidates)
    first = first_of(people, candidates, hits)
    columns = {f"top{best}_{n}": first for n in range(1, evaluators) for best in (1, 5)}
    columns |= verified_columns(people, candidates, [hits] * evaluators)
    columns |= {"face_similarity": similarity - 0.01, "ssim": level / 2 + 0 * flat}
    columns |= {"psnr": 10 + 5 * level * flat, "fsim": 0.7 * flat, "mse": 0.05 * flat}
    columns |= {"manifold": 0.3 * flat, "similarity": similarity}
    return Rows(torch.arange(people), columns)


def useful(mcc: float, auc: float) -> dict[str, Any]:
    means = {"mean_mcc": mcc, "mean_auc": auc, "accuracy": 0.9}
    ends = {
        f"{name}_{end}": value + by
        for name, value in means.items()
        for end, by in (("low", -0.04), ("high", 0.03))
    }
    return means | ends | {"attributes": 5, "counted": 5, "images": 40, "people": 20}


def make_feature_run(
    folder: Path,
    audits: Sequence[dict[str, Any]],
    *,
    people: int = 8,
    images: int = 2,
    names: Sequence[str] = (),
    size: int = 8,
    evaluators: Sequence[float] = (0.97, 0.95),
    references: tuple[float, float] = (0.7, 0.02),
    settings: dict[str, Any] | None = None,
    name: str = "trial",
    failed: Sequence[str] = (),
    thresholds: dict[str, float] | None = None,
    attributes: dict[str, list[bool]] | None = None,
    reconstructed: Sequence[torch.Tensor] = (),
    victims: torch.Tensor | None = None,
) -> Path:
    """Write a run folder of audits of features.

    Each audit may set `defenses`, `attack`, `case`, `similarity`, `baseline`, `control`
    (similarity in the positive control, None for no control), `hits`, `mcc`, `auc`, `plain` (MCC
    of plain features), `partial` (number of people whose search stopped early), `noted` (by the
    protection), `moved`, `cut`, `shape`, `model`, `lda` and `label`. Audits alike in all but the
    attack share what was released.
    """
    names = tuple(names) or tuple(f"person {place}" for place in range(people))
    rng = torch.Generator().manual_seed(1)
    if victims is None:
        victims = random_pixels(rng, people * images, 3, size, size)
    owners = torch.arange(people).repeat_interleave(images)
    true = Images(victims, owners, names, tuple(f"{place}.png" for place in range(len(victims))))
    true = marked(true, attributes)
    networks = (evaluators_of(evaluators, names), network("resnet", 0.9, "embedder", names))
    scale = {"same_person": references[0], "different_people": references[1]}
    results = [
        _feature_audit(f"{name}{place}", spec, true, networks, scale, rng, reconstructed[place:])
        for place, spec in enumerate(audits)
    ]
    labels = [
        spec.get("label", ", ".join(filter(None, [defense_label(spec), spec.get("case", "")])))
        for spec in audits
    ]
    settings = {"name": name} if settings is None else settings
    run = Run(
        name, settings, tuple(labels), tuple(results), tuple(failed),
        date="2026-01-03T10:20:30+00:00", thresholds=fixed(thresholds),
    )  # fmt: skip
    return write_run(run, folder)


def _feature_audit(
    name: str,
    spec: dict[str, Any],
    true: Images,
    networks: tuple[tuple[Evaluator, ...], Target],
    references: dict[str, float],
    rng: torch.Generator,
    reconstructed: Sequence[torch.Tensor],
) -> Audit:
    evaluators, embedder = networks
    people = len(true.names)
    images, level = len(true) // people, spec.get("control", 0.6)
    model, cut = spec.get("model", "cnn"), spec.get("cut", "stage1")
    experiment = experiment_of(
        "trial",
        spec,
        target={"cut": cut, "attributes": ["all"], "model": model},
        prior={"name": "wgan"},
        attack=spec.get("attack", {"name": "decoder"}),
        judging={"images": images, "positive_control": level is not None},
    )
    candidates = images * experiment.attack.kept

    def rows(level: float, hits: int) -> Rows:
        return feature_rows(level, people, candidates, len(evaluators), hits)

    own = replace(rows(spec.get("similarity", 0.6), spec.get("hits", 4)), key=name)
    what = json.dumps([spec.get(part) for part in ("defenses", "cut", "model", "released")])
    attributes = ("beard", "glasses", "smile")
    target = network(model, 0.9, f"target{what}", attributes, cut=cut, attributes=True)
    released = Released(torch.zeros(1), tuple(spec.get("noted", ())), f"released{what}")
    device: Any = SimpleNamespace(target=target)
    exposure = FeatureExposure(device, None, tuple(range(people)), true, released)  # type: ignore[arg-type]
    pixels = torch.rand((people, candidates, *true.shape), generator=rng)
    pixels = reconstructed[0] if reconstructed else pixels
    confidence, labels = torch.full((people, candidates), 0.4), torch.arange(people)
    partial = labels < spec.get("partial", 0)
    result = Reconstructions(pixels, labels, confidence, confidence, 31_200, 75.5, name)
    result = replace(result, partial=partial)
    trial = Trial(exposure, None, result, result, own, rows(spec.get("baseline", 0.05), 0))
    control = None if level is None else replace(trial, rows=rows(level, 0))
    controls = verdict(experiment, trial, control, evaluators=evaluators, references=references)
    split, facts = split_of(true), _release_facts(spec)
    measuring, verifiers = zip(*evaluators, strict=True)
    return Audit(
        experiment=experiment, split=split, evaluators=measuring, verifiers=verifiers,
        embedder=embedder, trial=trial, control=control, controls=controls, facts=facts,
    )  # fmt: skip


def _release_facts(spec: dict[str, Any]) -> dict[str, Any]:
    distances = {"deviation": 0.1, "relative_deviation": spec.get("moved", 0.0)}
    distances |= {"feature_shape": list(spec.get("shape", SHAPE)), "lda": spec.get("lda", 1.25)}
    distances |= {"device_share": spec["share"]} if "share" in spec else {}
    ceiling = {"ceiling_utility": useful(spec["ceiling"], 0.85)} if "ceiling" in spec else {}
    return ceiling | {
        "utility": useful(spec.get("mcc", 0.61), spec.get("auc", 0.85)),
        "plain_utility": useful(spec.get("plain", spec.get("mcc", 0.61)), 0.85),
        "facts": distances | {"emd": 3.5, "emd_floor": 2.25},
    }


def feature_page(tmp_path: Path, audits: Sequence[dict[str, Any]], **options: Any) -> Page:
    """The report of one run of features."""
    run = make_feature_run(tmp_path / "run", audits, **options)
    return Page(build_report([run], tmp_path / "report.html"))


def feature_study(tmp_path: Path, audits: Sequence[dict[str, Any]], **options: Any) -> Study:
    (study,) = group([read_run(make_feature_run(tmp_path / "run", audits, **options))])
    return study


def interval_text(score: dict[str, float]) -> str:
    """A score as the page writes it."""
    return f"{score['value']:.2f} (interval {score['low']:.2f} to {score['high']:.2f})"


def scores_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        audit["scores"]
        for audit in json.loads((tmp_path / "run" / "run.json").read_text())["audits"]
    ]
