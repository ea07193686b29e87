"""What a run.json holds, as far as a report needs it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, field_validator

from frostglass.report.networks import EvaluatorFacts, Network, TrainingFacts

LARGEST = 1.01  # of a share or a correlation, with room for rounding


class Measured(BaseModel):
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    by_identity: list[FiniteFloat] | None = None
    first: FiniteFloat | None = None
    any: FiniteFloat | None = None

    @property
    def extreme(self) -> float:
        return max(abs(self.value), abs(self.low), abs(self.high))


Correlation = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class Utility(BaseModel):
    """How well a server predicts attributes from features."""

    mean_mcc: Correlation
    mean_mcc_low: Correlation
    mean_mcc_high: Correlation
    mean_auc: Correlation
    mean_auc_low: Correlation
    mean_auc_high: Correlation
    accuracy: Correlation


class References(BaseModel):
    """The scale of a similarity: two photos of one person, and photos of two people."""

    same_person: Correlation
    different_people: Correlation


class ReleaseFacts(BaseModel):
    """About the released features, and about the reconstructions as a whole."""

    relative_deviation: FiniteFloat
    feature_shape: list[int] = Field(min_length=1)
    device_share: FiniteFloat | None = None  # not in runs of earlier versions
    lda: FiniteFloat | None
    emd: FiniteFloat
    emd_floor: FiniteFloat


class Controls(BaseModel):
    deciding: str
    lift: dict[str, Measured]
    control_lift: dict[str, Measured]
    margin: FiniteFloat
    p_value: FiniteFloat | None
    people_needed: int | None
    agreement: FiniteFloat | None
    fooled: bool
    manifold: FiniteFloat | None
    references: References | None
    vacuous: str
    warnings: list[str]


class Exposed(BaseModel):
    identity: str
    value: FiniteFloat


class ModelFile(BaseModel):
    """The file of an audited model; without a hash where it is no file."""

    name: str
    sha256: str | None


class FixedThresholds(BaseModel):
    """Limits by name, when they were recorded ("" for never), and whether before the results."""

    limits: dict[str, FiniteFloat]
    recorded: str
    before_results: bool
    others: int = 0


class AuditFacts(BaseModel):
    """One audit: `case` is the config's name for it, `partial` lists people without a full search.

    `access` is what the attack was granted, `steps` the mean number of steps of its searches,
    `worst` the most exposed people. `summaries` are scores of the whole set, without rows.
    """

    label: str
    case: str
    surface: Literal["model", "features"]
    seed: int
    defenses: list[dict[str, Any]]
    attack: dict[str, Any]
    access: list[str]
    prior: dict[str, Any] | None
    target: Network
    training: TrainingFacts
    evaluators: list[EvaluatorFacts] = Field(min_length=1)
    scores: dict[str, Measured]
    prior_only: dict[str, Measured]
    summaries: dict[str, Measured] = Field(default_factory=dict)
    prior_only_summaries: dict[str, Measured] = Field(default_factory=dict)
    conventions: dict[str, dict[str, FiniteFloat]]
    controls: Controls
    worst: list[Exposed]
    queries: int
    steps: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None
    partial: list[str]
    seconds: FiniteFloat
    keys: dict[str, str | None]
    file: ModelFile | None = None  # absent in runs of earlier versions

    @property
    def verified(self) -> list[str]:
        """Names of the scores that say whether an evaluator accepts a reconstruction."""
        return [f"verified_{place}" for place in range(1, len(self.evaluators) + 1)]


class FeatureControls(Controls):
    references: References


class FeatureAudit(AuditFacts):
    """An attack on released features; `released` is what the protection noted, by batch."""

    surface: Literal["features"]
    cut: str
    attributes: list[str] = Field(min_length=1)
    images_per_person: Annotated[int, Field(ge=1)]
    utility: Utility
    plain_utility: Utility
    ceiling_utility: Utility | None = None
    facts: ReleaseFacts
    released: list[dict[str, Any]]
    explained: FiniteFloat
    controls: FeatureControls


class ModelAudit(AuditFacts):
    surface: Literal["model"]
    agreement: FiniteFloat | None = None


class RunFacts(BaseModel):
    """What a report needs of a run.json; `evaluators` are those of an audit that has most."""

    name: str
    date: str = ""
    store: str = ""
    thresholds: FixedThresholds | None = None
    settings: dict[str, Any]
    versions: dict[str, str]
    threads: int
    data: dict[str, Any]
    identities: list[str] = Field(min_length=1)
    attributes: dict[str, list[bool]] = Field(default_factory=dict)
    evaluators: list[EvaluatorFacts] = Field(min_length=1)
    embedder: Network | None
    audits: Sequence[AuditFacts]
    failed: list[str]
    not_run: list[str] = []  # absent in runs of versions without budgets

    @field_validator("settings")
    @classmethod
    def _has_a_grid_of_tables(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(settings.get("grid", {}), dict):
            raise ValueError("grid: expected a table")
        return settings

    @property
    def surface(self) -> Literal["model", "features"]:
        return self.audits[0].surface

    @property
    def networks(self) -> list[Network | EvaluatorFacts]:
        """The evaluators, and the embedder of features if there is one."""
        return [*self.evaluators, *([self.embedder] if self.embedder else [])]

    @property
    def top1(self) -> list[str]:
        """Names of the scores that say whether a classifier ranks the person first."""
        kinds = enumerate((each.kind for each in self.evaluators), 1)
        return [f"top1_{place}" for place, kind in kinds if kind == "classifier"]


class ModelRun(RunFacts):
    audits: list[ModelAudit] = Field(min_length=1)


class FeatureRun(RunFacts):
    embedder: Network
    audits: list[FeatureAudit] = Field(min_length=1)


def parsed(document: Mapping[str, Any]) -> RunFacts:
    """Validate a run.json; all its audits must be of the surface of the first."""
    audits = document.get("audits")
    first = audits[0] if isinstance(audits, list) and audits else None
    features = isinstance(first, dict) and first.get("surface") == "features"
    # Strict, because parts of a report read the document itself: "3" must not pass as a number.
    return (FeatureRun if features else ModelRun).model_validate(document, strict=True)
