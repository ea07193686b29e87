"""The schema of the JSON beside a page; `report.schema.json` is what `schema_text` returns.

After a change of the models write it anew:
python -c "from frostglass.report.schema import schema_text; print(schema_text(), end='')"
"""

import json
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat

from frostglass.report.facts import FeatureRun, ModelRun
from frostglass.report.origin import Status
from frostglass.report.outcome import Outcome

FILE = "report.schema.json"


class LimitFacts(BaseModel):
    """One limit, what was measured with its interval, and by which attack on how many people."""

    name: str
    limit: FiniteFloat
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    attack: str
    people: int
    outcome: Outcome


class OutcomeFacts(BaseModel):
    """The answer for one model or protection."""

    subject: str
    outcome: Outcome
    checks: list[LimitFacts]
    reasons: list[str]


class AnswerFacts(BaseModel):
    """What page one says about the runs that can be compared."""

    runs: str
    surface: Literal["model", "features"]
    vacuous: list[str]
    sentences: list[str]
    thresholds: list[OutcomeFacts]
    next: list[str]
    notes: list[str]
    attacks: list[str]


class OriginFacts(BaseModel):
    run: str
    status: Status
    text: str
    places: str


class TableFacts(BaseModel):
    """A table of the page as texts."""

    name: str
    head: list[str]
    rows: list[list[str]]


class ReportDocument(BaseModel):
    """The JSON beside a report of Frostglass."""

    format: int
    redacted: bool
    images: bool
    partial: bool
    missing: list[str]
    origins: list[OriginFacts]
    answers: list[AnswerFacts]
    runs: list[ModelRun | FeatureRun]
    tables: list[TableFacts]
    analyses: list[dict[str, Any]] = Field(default_factory=list)


def schema_text() -> str:
    """Return the schema that follows from the code."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ReportDocument.model_json_schema(),
    }
    return json.dumps(schema, indent=1) + "\n"


def report_schema() -> dict[str, Any]:
    """Return the schema that ships with the package."""
    text = resources.files("frostglass.report").joinpath(FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
