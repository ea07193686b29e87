"""Many participants of a study at once, against the real server on this machine's loopback.

Every visitor agrees, then loads each page with all its images, looks at it for a while and answers.
Visitors and server share the cores, so that the figures are below what the server alone could do.

Alone: python -m benchmarks.human_study
"""

import asyncio
import csv
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import torch

from benchmarks.measured import Measured
from frostglass.runtime.seeding import generator_for
from frostglass.study.answers import Answers
from frostglass.study.folder import StudyFolder, write_folder
from frostglass.study.items import Gallery, ItemMaker
from frostglass.study.make import StudyOptions, design_of, invite
from frostglass.study.material import Material, Source

PARTICIPANTS, PEOPLE, PIXELS = 300, 40, 64
LOOKING = 8.0  # seconds that a visitor looks at a page, on average
SLOWEST = 1.0  # goal for 99 of 100 requests, in seconds
LONGEST = 600.0  # seconds after which the load is ended


@dataclass(frozen=True)
class Load:
    """What a number of visitors met."""

    seconds: float
    latencies: list[float]
    answers: int
    kept: int

    def quantile(self, share: float) -> float:
        return torch.tensor(self.latencies, dtype=torch.double).quantile(share).item()


def measure() -> Iterator[Measured]:
    """Let 300 participants answer at once."""
    with tempfile.TemporaryDirectory() as folder:
        study = made_up_study(Path(folder) / "study", PARTICIPANTS, PEOPLE, PIXELS)
        with _served(study.path) as port:
            load = run_load(study, port)
    note = (
        f"{len(load.latencies) / load.seconds:.0f} requests and "
        f"{load.answers / load.seconds:.0f} answers a second, for {load.seconds:.0f} s; the "
        f"middle one {1000 * load.quantile(0.5):.0f} ms"
    )
    name = f"{PARTICIPANTS} participants at once, 99 % of requests, s"
    yield Measured(name, load.quantile(0.99), note, most=SLOWEST)
    yield Measured(
        "answers that were kept, of those confirmed", load.kept / load.answers, least=1.0
    )


def made_up_study(path: Path, participants: int, people: int, pixels: int) -> StudyFolder:
    """Make a study of two models with random images, as large as real ones."""
    rng = generator_for(0, "human study benchmark")

    def images() -> torch.Tensor:
        return torch.randint(0, 256, (people, 3, pixels, pixels), generator=rng, dtype=torch.uint8)

    sources = tuple(
        Source(name, "attack", "", dict(enumerate(images())), {n: {} for n in range(people)})
        for name in ("one", "two")
    )
    real = images()
    maker = ItemMaker(Material("benchmark", real, real, sources), Gallery(), rng)
    options = StudyOptions(participants, raters=max(1, participants // 30), people=people)
    design = design_of(maker, options, [])
    folder = write_folder(path, design, maker.gallery.images)
    invite(folder)
    return folder


def run_load(folder: StudyFolder, port: int, looking: float = LOOKING) -> Load:
    """Let all participants answer all of a study that is served, and count what was kept."""
    begun = time.perf_counter()
    visitors = asyncio.run(_visit_all(folder, port, looking))
    seconds = time.perf_counter() - begun
    answers = Answers(folder.answers, folder.id, read_only=True)
    kept = len(answers.all())
    answers.close()
    latencies = [latency for each in visitors for latency in each.latencies]
    return Load(seconds, latencies, sum(each.answers for each in visitors), kept)


async def _visit_all(folder: StudyFolder, port: int, looking: float) -> Sequence["_Visitor"]:
    with (folder.path / "links.csv").open(encoding="utf-8") as file:
        links = [row["link"] for row in csv.DictReader(file)]
    rng = generator_for(0, "visitors")
    pauses = (2 * looking * torch.rand(len(links), 64, generator=rng)).tolist()
    visitors = [_Visitor(port, link, own) for link, own in zip(links, pauses, strict=True)]
    async with asyncio.timeout(LONGEST):
        await asyncio.gather(*(each.visit() for each in visitors))
    return visitors


class _Visitor:
    """A browser with one connection that it keeps, as far as the server lets it."""

    def __init__(self, port: int, link: str, pauses: Sequence[float]):
        self._port, self._link, self._pauses = port, link, pauses
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.latencies: list[float] = []
        self.answers = 0

    async def visit(self) -> None:
        await asyncio.sleep(self._pauses[0])  # people do not open their links in one moment
        await self._ask("GET", self._link)
        await self._ask("POST", f"{self._link}/consent", {"agree": "yes"})
        while True:
            page = await self._ask("GET", self._link)
            found = re.search(r'name="place" value="(\d+)"', page)
            if not found:
                break
            for image in re.findall(r'<img src="([^"]+)"', page):
                await self._ask("GET", image)
            place = int(found[1])
            await asyncio.sleep(self._pauses[place % len(self._pauses)])
            await self._ask("POST", f"{self._link}/answer", {"place": found[1], "choice": "0"})
            self.answers += 1
        if self._streams:
            self._streams[1].close()

    async def _ask(self, method: str, path: str, form: dict[str, str] | None = None) -> str:
        body = urlencode(form or {}).encode()
        kind = "content-type: application/x-www-form-urlencoded\r\n" if form else ""
        head = f"{method} {path} HTTP/1.1\r\nhost: study\r\n{kind}content-length: {len(body)}\r\n"
        begun = time.perf_counter()
        for again in (True, False):
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            try:
                writer.write(head.encode() + b"\r\n" + body)
                text = await _response(reader)
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                # The server closes idle connections; a browser opens another and repeats.
                self._streams = None
                if not again:
                    raise
        self.latencies.append(time.perf_counter() - begun)
        return text


async def _response(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status = int(head.split(" ", 2)[1])
    if status not in (200, 303):
        raise RuntimeError(f"unexpected status {status}")
    found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    return (await reader.readexactly(int(found[1]) if found else 0)).decode("latin-1")


@contextmanager
def _served(path: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "frostglass", "study", "serve", str(path), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        found = re.search(r"http://[^:]+:(\d+)", server.stderr.readline())
        assert found
        yield int(found[1])
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    for measured in measure():
        print(measured.line)
