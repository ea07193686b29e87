"""What is known of the private people: attributes, for an attack or for a report's strata."""

from collections.abc import Sequence

from frostglass.core.types import Images
from frostglass.training.settings import attributes_in


def attribute_of_people(images: Images, name: str) -> tuple[bool, ...]:
    """Return for each class whether most of its images have the attribute."""
    marks = attributes_in(images, (name,))[:, 0]
    people = range(len(images.names))
    return tuple(bool(marks[images.labels == label].mean() > 0.5) for label in people)


def attributes_of_people(images: Images, people: Sequence[int]) -> dict[str, list[bool]]:
    """Return which of `people` have an attribute, for those that some have and some do not."""
    every = {name: attribute_of_people(images, name) for name in images.attribute_names}
    marks = {name: [has[person] for person in people] for name, has in every.items()}
    return {name: values for name, values in marks.items() if len(set(values)) > 1}
