"""Whether there are as many people and images as an experiment asks for."""

from frostglass.auditing.experiment import Experiment


def too_few_people(exp: Experiment, people: int) -> list[str]:
    """Check how many private people are attacked."""
    wanted = exp.judging.identities
    if wanted is None or wanted <= people:
        return []
    return [
        f"identities must be at most {people}, the number of private people, got {wanted}. "
        "Lower it, or remove it to attack all of them."
    ]


def too_few_victims(exp: Experiment, counts: tuple[int, int, int], test: float) -> list[str]:
    """Check how many held-out images of each person leave the device, of a share `test` of all."""
    classes, private, _ = counts
    held_out = max(1, round(private // classes * test))
    if exp.judging.images <= held_out:
        return []
    return [
        f"images must be at most {held_out}, the held-out images of each person, got "
        f"{exp.judging.images}. Lower it, or raise split.test."
    ]


def too_few_images(exp: Experiment, test: float) -> list[str]:
    """Check that two training images of some person are left to calibrate similarity with."""
    images = exp.data.most_of_one()
    held_out = sum(max(1, round(images * share)) for share in (test, exp.split.validation))
    if images - held_out >= 2:
        return []
    return [
        "at least 2 training images of some person are needed to calibrate similarity, got "
        f"{images - held_out} ({images} images, {held_out} held out). Add images of a person."
    ]
