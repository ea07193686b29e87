"""What runs have to show: of each model, the reconstruction of each person and its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.report.arrange import group
from frostglass.report.entry import Entry, strongest
from frostglass.report.load import read_run
from frostglass.report.study import Study, Subject
from frostglass.report.text import listed


@dataclass(frozen=True)
class Source:
    """One model, or protection, by the attack that was strongest on it."""

    label: str
    attack: str
    vacuous: str
    images: dict[int, Tensor]  # of each person, the attack's first guess
    metrics: dict[int, dict[str, float]]


@dataclass(frozen=True)
class Material:
    """Real images of all people, and the models whose reconstructions can be shown.

    `real` (I, C, H, W) is what a reconstruction is compared with. `candidates` are the images among
    which a person is sought: others of the same people, where the run has them.
    """

    name: str
    real: Tensor
    candidates: Tensor
    sources: tuple[Source, ...]

    @property
    def people(self) -> list[int]:
        """The people whom every model has a reconstruction of."""
        shared = set.intersection(*(set(source.images) for source in self.sources))
        return sorted(shared)


def read_material(
    folders: Sequence[Path], *, only: Sequence[str] = (), attack: str = ""
) -> Material:
    """Read run folders; `only` chooses models by name, `attack` one of several attacks."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not paths:
        raise DataError("a study needs at least one run folder, got none")
    studies = group([read_run(path) for path in paths])
    if len(studies) > 1:
        names = listed([study.name for study in studies])
        raise DataError(
            f"the runs ({names}) are not about the same people, images and evaluators: "
            "make a study of each"
        )
    study = studies[0]
    images, features = study.runs[0].images, study.surface == "features"
    private = images["victims"] if features else images["private"].unsqueeze(1)
    chosen = _chosen(study, only)
    sources = tuple(_source(subject, attack, study) for subject in chosen)
    return Material(study.name, private[:, 0], private[:, min(1, private.shape[1] - 1)], sources)


def _chosen(study: Study, only: Sequence[str]) -> list[Subject]:
    known = [subject.name for subject in study.subjects]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            f"--only: no model {unknown[0]!r} in these runs, which have {'; '.join(known)}"
        )
    return [subject for subject in study.subjects if not only or subject.name in only]


def _source(subject: Subject, attack: str, study: Study) -> Source:
    # An attack that predicts embeddings shows public images, which nobody reconstructed.
    shown = [entry for entry in subject.entries if not entry.embeds]
    if not shown:
        raise DataError(
            f"no attack on {subject.name} makes images: leave it out with --only, or add one"
        )
    named = [entry for entry in shown if attack in ("", entry.method)]
    if not named:
        methods = "; ".join(dict.fromkeys(entry.method for entry in shown))
        raise ConfigError(
            f"--attack: {subject.name} was not attacked by {attack!r}, but by {methods}"
        )
    entry = strongest(named)
    people = _people(entry, study)
    columns = entry.run.rows[entry.number].columns
    return Source(
        subject.name,
        entry.method,
        entry.vacuous,
        {person: entry.reconstructions[row, 0] for person, row in people.items()},
        {
            person: {name: values[row, 0].item() for name, values in columns.items()}
            for person, row in people.items()
        },
    )


def _people(entry: Entry, study: Study) -> dict[int, int]:
    """Return the row of each person; without those whose search was stopped early."""
    place = {name: number for number, name in enumerate(study.first.identities)}
    return {
        place[name]: row
        for row, name in enumerate(entry.run.rows[entry.number].names)
        if name in place and name not in entry.facts.partial
    }
