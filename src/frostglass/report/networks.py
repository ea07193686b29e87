"""Networks as a run.json describes them: targets, how they were trained, and evaluators."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat


class HeldOut(BaseModel):
    test: Annotated[float, Field(ge=0, le=1)]


class Network(BaseModel):
    model: str
    parameters: int
    accuracy: HeldOut
    selected_epoch: int | None
    key: str


class VerifierFacts(BaseModel):
    """How an evaluator was calibrated: one value per false-accept rate, and what they rest on."""

    rates: list[FiniteFloat] = Field(min_length=1)
    thresholds: list[FiniteFloat]
    true_accepts: list[FiniteFloat]
    impostor_share: list[FiniteFloat]
    genuine: int
    comparisons: int
    impostors: int


class EvaluatorFacts(BaseModel):
    """An evaluator; `excluded` says why it does not count, `decides` whether it verifies first."""

    model: str
    parameters: int
    accuracy: HeldOut | None
    key: str
    kind: Literal["classifier", "embedder"]
    trained_on: str | None = None
    verifier: VerifierFacts
    excluded: str
    decides: bool


class FirstStage(BaseModel):
    data: str
    epochs: int
    classes: int
    accuracy: HeldOut
    before: "FirstStage | None" = None


class TrainingFacts(BaseModel):
    """How a target was trained; `facts` are what its defenses report about it, by their names."""

    recipe: dict[str, Any]
    trainable: int | None
    facts: dict[str, dict[str, Any]]
    first_stage: FirstStage | None
    seconds: FiniteFloat | None
    first_stage_seconds: FiniteFloat | None
    times_undefended: FiniteFloat | None
    strangers_accepted: FiniteFloat | None = None
