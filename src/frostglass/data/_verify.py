"""Says of a folder on disk whether it is a published dataset, and what is missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.registry import nearest
from frostglass.data._inspect import Finding, Published
from frostglass.data.base import datasets


@dataclass(frozen=True)
class Verification:
    """What was found in the folder of a dataset."""

    name: str
    root: Path
    findings: list[Finding]
    steps: list[str]

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or differs."""
        return not any(finding.bad for finding in self.findings)


def published_names() -> list[str]:
    """List the datasets that can be verified."""
    return [name for name in datasets.names() if issubclass(datasets.get(name), Published)]


def published_dataset(name: str) -> type[Any]:
    """Return the class of a dataset that is published as files."""
    known = published_names()
    if name not in known:
        raise ConfigError(f"no published dataset named {name!r}: {nearest(name, known)}")
    dataset: type[Any] = datasets.get(name)
    return dataset


def preparation_steps(name: str) -> list[str]:
    """Return the steps that prepare a dataset, without their numbers."""
    text, steps = published_dataset(name).preparation, []
    for number in range(1, 10):
        _, mark, text = text.partition(f"{number}. ")
        if not mark:
            break
        steps.append(text.partition(f"; {number + 1}. ")[0])
    return steps


def verify(name: str, root: Path, *, hashes: bool = True) -> Verification:
    """Compare the folder of a dataset with what its publishers say of it.

    Args:
        name: a dataset that is published as files, such as "celeba".
        hashes: compare published MD5 hashes, which reads those files whole.
    """
    dataset, root = published_dataset(name), root.expanduser()
    if not root.is_dir():
        raise DataError(f"no folder at {root}. {dataset.title}: {dataset.preparation}")
    try:
        findings = dataset.inspect(root, hashes=hashes)
    except DataError as error:  # such as a damaged list: that too is a finding
        findings = [Finding("files", "differs", str(error))]
    return Verification(name, root, findings, preparation_steps(name))
