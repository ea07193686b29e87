"""What an attack may be told of the private people: one attribute of each."""

from frostglass.core.types import Images
from frostglass.training.settings import attributes_in


def attribute_of_people(images: Images, name: str) -> tuple[bool, ...]:
    """Return for each class whether most of its images have the attribute."""
    marks = attributes_in(images, (name,))[:, 0]
    people = range(len(images.names))
    return tuple(bool(marks[images.labels == label].mean() > 0.5) for label in people)
