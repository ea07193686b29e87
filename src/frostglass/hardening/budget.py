"""How long a search may take."""

import re
from dataclasses import dataclass

from frostglass.core.errors import ConfigError

UNITS = {"h": 3600, "m": 60, "s": 1}
EXAMPLES = "such as 2h, 90m, 1h30m, 45s or 30 trials"


@dataclass(frozen=True)
class SearchBudget:
    """Seconds of trials, or a number of them; no trial starts after it is spent."""

    seconds: float | None = None
    trials: int | None = None

    @classmethod
    def parse(cls, text: str) -> "SearchBudget":
        """Read a time or a number of trials."""
        if counted := re.fullmatch(r"\s*(\d+)\s*trials?\s*", text):
            budget = cls(trials=int(counted[1]))
        elif re.fullmatch(r"\s*(\d+(\.\d+)?\s*[hms]\s*)+", text):
            parts = re.findall(r"(\d+(?:\.\d+)?)\s*([hms])", text)
            budget = cls(seconds=sum(float(number) * UNITS[unit] for number, unit in parts))
        else:
            raise ConfigError(
                f"budget: expected a time or a number of trials, {EXAMPLES}; got {text!r}"
            )
        if not (budget.seconds or budget.trials):
            raise ConfigError(f"budget: expected more than nothing, {EXAMPLES}; got {text!r}")
        return budget

    def spent(self, seconds: float, trials: int) -> bool:
        """Return whether so many seconds, in so many trials, use it up."""
        if self.trials is not None:
            return trials >= self.trials
        return self.seconds is not None and seconds >= self.seconds
