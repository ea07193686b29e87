"""Studies of made-up runs, and visitors who answer them over HTTP as a browser would."""

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frostglass.study.answers import Answer, Answers
from frostglass.study.folder import Item, Participant, StudyFolder, Trial
from frostglass.study.make import StudyOptions, make_study
from frostglass.study.serve import serve_study
from killing import fork
from run_folders import BROKEN, DEFENDED, make_run

FORM = {"content-type": "application/x-www-form-urlencoded"}


def study_of_run(
    tmp_path: Path,
    audits: Sequence[dict[str, Any]] = (BROKEN, DEFENDED),
    *,
    people: int = 20,
    shown: int = 6,
    **options: Any,
) -> StudyFolder:
    """Make a study of a run folder of made-up reconstructions; `shown` of its people take part."""
    run = make_run(tmp_path / "run", audits, people=people)
    chosen = {"participants": 6, "raters": 2, "people": shown, **options}
    return make_study([run], tmp_path / "study", StudyOptions(**chosen))


def tokens(folder: StudyFolder) -> dict[str, str]:
    """Return the token of each participant."""
    with (folder.path / "links.csv").open(encoding="utf-8") as file:
        return {row["participant"]: row["link"].removeprefix("/p/") for row in csv.DictReader(file)}


def of_protocol(folder: StudyFolder, protocol: str) -> Participant:
    return next(each for each in folder.design.participants if each.protocol == protocol)


class Visitor:
    """A participant with a link; `client` is an HTTP client that follows redirects."""

    def __init__(self, client: Any, folder: StudyFolder, participant: Participant):
        self.client, self.folder, self.participant = client, folder, participant
        self.token = tokens(folder)[participant.id]
        self.home = f"/p/{self.token}"

    def look(self) -> Any:
        return self.client.get(self.home)

    def post(self, action: str, **fields: Any) -> Any:
        return self.client.post(f"{self.home}/{action}", data=fields)

    def begin(self) -> Any:
        self.look()
        return self.post("consent", agree="yes")

    def place(self) -> int | None:
        """The number of the trial that the page shows; None if it shows another page."""
        found = re.search(r'name="place" value="(\d+)"', self.look().text)
        return int(found[1]) if found else None

    def trial(self, place: int) -> tuple[Trial, Item]:
        trial = self.participant.trials[place]
        return trial, self.folder.design.items[trial.item]

    def choose(self, place: int, option: int) -> Any:
        """Answer with an option of the item, wherever it is shown."""
        trial, item = self.trial(place)
        position = "none" if option == item.none else trial.order.index(option)
        return self.post("answer", place=place, choice=position)

    def finish(self, choose: Callable[[Item], int], *, most: int = 1000) -> Any:
        """Answer all open trials, or so many; attention checks are answered well."""
        page = self.look()
        for _ in range(most):
            if (place := self.place()) is None:
                break
            _, item = self.trial(place)
            page = self.choose(place, item.truth if item.check else choose(item))
        return page


@contextmanager
def forked(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve a study in a forked process, which starts at once; killed with SIGKILL at the end."""
    ready, tell = os.pipe()

    def serve() -> None:
        serve_study(folder, port=0, ready=lambda address: os.write(tell, f"{address}\n".encode()))

    pid = fork(serve)
    os.close(tell)
    try:
        with os.fdopen(ready) as pipe:
            address = pipe.readline().strip()
        assert address
        yield address, int(address.rpartition(":")[2])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a study with the command, on a port of its own; killed at the end."""
    command = [sys.executable, "-m", "frostglass", "study", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        line = server.stderr.readline()
        found = re.search(r"served at (http://\S+);", line)
        assert found, line
        yield found[1], server
    finally:
        server.kill()
        server.wait()


def answer_all(
    folder: StudyFolder,
    choose: Callable[[Participant, Item], int | None],
    *,
    careless: Sequence[str] = (),
    seconds: float = 4.0,
) -> None:
    """Write the answers of all participants; those who are careless fail attention checks."""
    answers = Answers(folder.answers, folder.id)
    for who in folder.design.participants:
        answers.consent(who.id, 0.0)
        for place, trial in enumerate(who.trials):
            item = folder.design.items[trial.item]
            choice = choose(who, item)
            if item.check:
                choice = (
                    (item.truth or 0) if who.id not in careless else 1 - min(1, item.truth or 0)
                )
            position = choice if choice in (None, item.none) else trial.order.index(choice)
            answers.record(Answer(who.id, place, choice, position, seconds), 0.0)
    answers.close()
