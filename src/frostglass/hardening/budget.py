"""How long a search may take."""

import re
from dataclasses import dataclass

from frostglass.core.duration import EXAMPLES, parse_duration
from frostglass.core.errors import ConfigError


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
        else:
            budget = cls(seconds=parse_duration(text))
        if not (budget.seconds or budget.trials):
            raise ConfigError(
                f"budget: expected a time or a number of trials, {EXAMPLES} or 30 trials; got "
                f"{text!r}"
            )
        return budget

    def spent(self, seconds: float, trials: int) -> bool:
        """Return whether so many seconds, in so many trials, use it up."""
        if self.trials is not None:
            return trials >= self.trials
        return self.seconds is not None and seconds >= self.seconds
