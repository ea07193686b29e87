"""What a config about split models would cost: its steps are walked without running any, and one step of each kind is timed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frostglass.attacks.features.base import FeatureAttack
from frostglass.audit.feature_pipeline import (
    INTERCEPT,
    Line,
    Pictures,
    ask_device,
    produce_features,
)
from frostglass.audit.features import FeatureExperiment
from frostglass.audit.pipeline import SPLIT
from frostglass.core.types import Halves, Shape, Target
from frostglass.defenses.base import Defense
from frostglass.networks.embedding import CENTRE
from frostglass.plan import feature_time as clock
from frostglass.plan.cost import Once, Plan, counts_of, prior_work, training_work
from frostglass.plan.feature_cost import known_attributes
from frostglass.plan.feature_memory import FeatureRehearsal
from frostglass.plan.memory import blank_split, foreseen
from frostglass.store.store import Step, Store
from frostglass.training.settings import Training, attributes_of

COMPARED = 2000  # public pictures that judges look at besides, in scores
LIKENESS = 0.002  # seconds, roughly, for a picture of 32 × 32 pixels to be compared with another by all measures of likeness
MEASURES = 1.0  # seconds, roughly, for what is computed anew of each audit: bootstrap over people, earth mover's distances


class FeaturePlan(Plan):
    """DryRunWork also what an attack asks of a device while it runs. A split that is there is read, for whether a release is there depends on its pictures."""

    def step(self, step: Step, config: Any, *inputs: Any, seed: int) -> Any:
        noted = super().step(step, config, *inputs, seed=seed)
        if step is SPLIT:
            there = self.has(step, config, *inputs, seed=seed)
            return (
                Store(self.root).step(step, config, *inputs, seed=seed)
                if there
                else _keyed(blank_split(config, inputs[0], counts_of), noted.key)
            )
        if step is INTERCEPT:
            ask_device(config, inputs[0], inputs[1])
        return noted


def _keyed(split: Any, key: str) -> Any:
    return replace(split, key=key, public=replace(split.public, key=f"{key}.public"))


def feature_estimate(
    chosen: Sequence[tuple[str, FeatureExperiment]], store: Store
) -> dict[str, Any]:
    """Every step of the experiments with its amount of work, whether it is done already, and about how long it takes here; the most memory, and where."""
    rows, seen, once, untimed, measures = [], set(), Once(), _Untimed(), 0.0
    # First: what is timed below leaves memory behind in this process.
    need = foreseen(
        chosen, store, lambda data: once(counts_of, data), produce_features, FeatureRehearsal
    )
    for label, exp in chosen:
        plan = FeaturePlan(store)
        produce_features(exp, plan)
        work, told = _Work(exp, once, plan), _Work(exp, untimed, plan)
        for key, (step, config, inputs, done) in plan.asked.items():
            if key not in seen:
                seen.add(key)
                words, seconds = getattr(told if done else work, step.name)(config, *inputs)
                rows.append(
                    {
                        "step": step.name,
                        "label": label,
                        "key": key,
                        "work": words,
                        "done": done,
                        "seconds": 0.0 if done else seconds,
                    }
                )
        measures += work.measures()
    rows.append({
        "step": "measures", "label": "each audit", "key": "", "work": f"{len(chosen)} audits", "done": False, "seconds": measures,
    })  # fmt: skip
    return {
        "steps": rows,
        "seconds": sum(row["seconds"] for row in rows),
        "memory_mib": need.bytes / 2**20,
        "memory_step": need.step,
        "memory_unknown": need.unknown,
    }


class _Untimed(Once):
    """Times nothing: what is done needs no estimate."""

    def __call__(self, find: Callable[..., Any], *given: Any) -> Any:
        return 0.0 if find.__name__.endswith("_seconds") else super().__call__(find, *given)


@dataclass(frozen=True)
class _Work:
    """The steps of one experiment, by their names: how much there is to do, in words, and about how many seconds that takes."""

    exp: FeatureExperiment
    once: Once
    plan: FeaturePlan

    def split(self, *_: Any) -> tuple[str, float]:
        private, public = self._counts[1:]
        return f"{private + public:,} pictures", (private + public) / 1000

    def target(
        self,
        config: Training,
        split: Any,
        defenses: Sequence[Defense],
        data: str,
        _: str,
        start: Any,
        judge: Any = None,
    ) -> tuple[str, float]:
        if config.weights:
            return "load weights", 1.0
        people, private, public = self._counts
        images = int(
            0.8 * public
            if data == "public"
            else private * (1 - self.exp.split.test - self.exp.split.validation)
        )
        classes = len(attributes_of(config, self._known)) if config.attributes else people
        words, seconds = training_work(config, images, classes, self._shape, self.once)
        if defenses:
            each = self.once(
                clock.defended_seconds,
                config,
                tuple(defenses),
                classes,
                self._shape,
                self.exp.perceptual if judge else None,
                images,
            )
            return f"{words}, with {', '.join(defense.name for defense in defenses)}", math.ceil(
                images / config.batch
            ) * config.epochs * each
        return words, seconds

    def prior(self, method: Any, *_: Any) -> tuple[str, float]:
        return prior_work(method, self._shape, 0, self._counts[2], self.once)

    def amortizer(self, config: Any, target: Any, prior: Any) -> tuple[str, float]:
        each = self.once(clock.amortizer_seconds, config, self._both, self._prior(prior))
        return f"{config.steps:,} steps of {config.batch} draws", config.steps * each

    def release(
        self,
        protection: Defense | None,
        target: Any,
        pictures: Pictures,
        prior: Any,
        amortizer_: Any,
        number: int,
    ) -> tuple[str, float]:
        count = len(pictures.images)
        if protection is None:
            return f"plain features of {count:,} pictures", count * self._encode
        # A weight changes no time; protections that differ in it alone are timed once.
        alike = replace(protection, beta=1.0) if hasattr(protection, "beta") else protection  # type: ignore[type-var]
        seconds = self.once(
            clock.release_seconds,
            alike,
            self._both,
            prior and self._prior(prior),
            self.exp.amortizer,
            count,
        )
        again = f", release {number + 1}" if number else ""
        return f"{protection.name} for {count:,} pictures{again}", seconds

    def lesson(self, lesson: Any, *_: Any) -> tuple[str, float]:
        public = self._counts[2]
        seconds = clock.schooling_seconds(
            lesson, public, self._step(lesson), self._encode, self._both.feature_shape
        )
        return (
            f"{lesson.name}: {lesson.epochs} epochs of {public:,} public pictures",
            seconds + self._known_people(lesson),
        )

    def intercept(
        self, attack: FeatureAttack, line: Line, public: Any, prior: Any, *_: Any
    ) -> tuple[str, float]:
        victims, student = len(line.victims.images), clock.student_of(attack)
        effort = attack.effort(victims)
        seconds = (effort.encoded + victims * attack.tries) * self._encode
        if effort.through_prior:
            critic = bool(getattr(attack, "critic_weight", 0))
            seconds += effort.through_prior * self.once(
                clock.search_seconds, self._both, self._prior(prior), critic
            )
        if effort.pixels:
            seconds += effort.pixels * self.once(clock.search_seconds, self._both, None, False)
        if student and effort.steps:
            seconds += effort.steps * self._step(student)
        parts = {
            "pictures along gradients": effort.through_prior + effort.pixels,
            "steps of learning": effort.steps,
        }
        told = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
        return f"{attack.name} on {victims} pictures{f': {told}' if told else ''}", seconds + (
            self._known_people(student) if student else 0.0
        )

    def blind(
        self, candidates: int, prior: Any, public: Any, people: list[int]
    ) -> tuple[str, float]:
        return f"{candidates * len(people)} draws", 0.1

    def feature_scores(
        self, embeds: bool, found: Any, victims: Pictures, *_: Any
    ) -> tuple[str, float]:
        count, public = len(victims.images) * self.exp.attack.tries, self._counts[2]
        judges = sum(
            self.once(_judge_seconds, config, self._shape) for config in self.exp.evaluators
        )
        pixels = math.prod(self._shape[1:]) / 32**2
        looked = (count + min(COMPARED, public)) * judges + (
            count + min(CENTRE, public)
        ) * self._embed
        return f"{count} pictures", looked + count * pixels * LIKENESS

    def measures(self) -> float:
        """What is computed anew of an audit that is done: embeddings of the people, and statistics."""
        _, private, public = self._counts
        return (
            MEASURES
            + (
                private * (1 - self.exp.split.test - self.exp.split.validation)
                + 2 * min(CENTRE, public)
            )
            * self._embed
        )

    @property
    def _counts(self) -> tuple[int, int, int]:
        return self.once(counts_of, self.exp.data)

    @property
    def _shape(self) -> Shape:
        return self.exp.data.image_shape

    @property
    def _known(self) -> tuple[str, ...]:
        return self.once(known_attributes, self.exp.data)[0]

    @property
    def _both(self) -> Halves:
        """The undefended model, cut; what a defense changes of its size is little."""
        attributes = len(attributes_of(self.exp.target, self._known))
        return self.once(
            clock.blank_halves,
            replace(self.exp.target, weights=None, start=None, start_parts=()),
            (),
            attributes,
            self._shape,
        )

    @property
    def _encode(self) -> float:
        return self.once(clock.looking_seconds, self._both.encoder, self._shape)

    @property
    def _embed(self) -> float:
        return self.once(_judge_seconds, self.exp.embedder, self._shape)

    def _prior(self, noted: Any) -> Any:
        return self.once(clock.blank_prior, self.plan.asked[noted.key][1], self._shape)

    def _step(self, lesson: Any) -> float:
        judge = (
            self.once(clock.blank_target, self.exp.perceptual, (), 2, self._shape)
            if "perceptual" in lesson.needs
            else None
        )
        size = self.once(_embedding, self.exp.embedder, self._shape) if lesson.embeds else 0
        return self.once(clock.lesson_seconds, replace(lesson, epochs=1), self._both, judge, size)

    def _known_people(self, lesson: Any) -> float:
        """The embeddings of public pictures, for who learns to guess them."""
        return self._counts[2] * (2 if lesson.flips else 1) * self._embed if lesson.embeds else 0.0


def _judge_seconds(config: Training, shape: Shape) -> float:
    return clock.looking_seconds(clock.blank_target(config, (), 2, shape).module, shape)


def _embedding(config: Training, shape: Shape) -> int:
    """How many numbers an embedding has."""
    judge: Target = clock.blank_target(config, (), 2, shape)
    return judge.outputs(clock.noise(2, *shape))[1].shape[1]
