"""Which evaluators can be trusted, and which of them decides."""

from collections.abc import Mapping, Sequence

from frostglass.auditing.experiment import Judging
from frostglass.core.types import Target
from frostglass.evaluators.verifier import Verifier

Evaluator = tuple[Target, Verifier]
COARSE = 0.05  # false-accept rate above which verification says little


def held_out_accuracy(classifier: Target) -> float:
    return classifier.info["accuracy"]["test"]


def exclusions(evaluators: Sequence[Evaluator], judging: Judging) -> dict[int, str]:
    """Return the numbers of evaluators that cannot be trusted, each with the reason."""
    reasons = {}
    for number, (network, verifier) in enumerate(evaluators, 1):
        name = f"evaluator {number} ({network.info.get('model', 'network')}) is excluded"
        accepted = verifier.true_accepts[0].item()
        if network.classes and held_out_accuracy(network) < judging.min_accuracy:
            reasons[number] = (
                f"{name}: it classifies {held_out_accuracy(network):.0%} of {network.tested_on} "
                f"correctly, required {judging.min_accuracy:.0%}"
            )
        elif verifier.rates[0].item() > COARSE:
            reasons[number] = (
                f"{name}: {verifier.impostors} public images support a false-accept rate of "
                f"{verifier.rates[0].item():.1%} at best, required {COARSE:.0%}"
            )
        elif accepted < judging.min_true_accepts:
            reasons[number] = (
                f"{name}: at a false-accept rate of {verifier.rates[0].item():.1%} it accepts "
                f"{accepted:.0%} of genuine images, required {judging.min_true_accepts:.0%}"
            )
    return reasons


def deciding_evaluator(evaluators: Sequence[Evaluator], excluded: Mapping[int, str]) -> int:
    """Return the number of the evaluator whose verification decides.

    Real images decide who it is, never reconstructions: the evaluator that accepts most genuine
    ones, among embedders before classifiers, and among trusted ones before excluded ones.
    """

    def rank(number: int) -> tuple[bool, bool, float]:
        network, verifier = evaluators[number - 1]
        trusted = number not in excluded
        return trusted, not network.classes, verifier.true_accepts[0].item()

    return max(range(1, len(evaluators) + 1), key=rank)
