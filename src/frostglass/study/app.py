"""The website of a study: every page and image needs the link of a participant."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frostglass.report.charts import png
from frostglass.study.answers import Answer, Answers, State
from frostglass.study.folder import Item, Participant, StudyFolder, Trial
from frostglass.study.pages import asset, page

LARGEST_FORM = 2048  # bytes
SLOWEST_FORM = 10.0  # seconds
LARGEST_IMAGE = 512  # pixels a side
GRACE = 3.0  # seconds by which an answer may be late: it travels, and images load
HEADERS = {
    "content-security-policy": "default-src 'none'; img-src 'self'; style-src 'self'; "
    "script-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # The address of a page is the key to it, so that no other site may learn it.
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-robots-tag": "noindex, nofollow",
}
T = TypeVar("T")
Clock = Callable[[], float]


def study_app(folder: StudyFolder, clock: Clock = time.time) -> ASGIApp:
    """Return the website of a study as an ASGI application; its lifespan closes the answers."""
    site = _Site(folder, clock)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        site.close()

    application = Starlette(
        routes=[
            Route("/static/{name}", _static),
            Route("/p/{token}", site.current),
            Route("/p/{token}/image/{place:int}/{slot:int}", site.image),
            Route("/p/{token}/consent", site.consent, methods=["POST"]),
            Route("/p/{token}/answer", site.answer, methods=["POST"]),
            Route("/p/{token}/stop", site.stop),
            Route("/p/{token}/stop", site.withdraw, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refused, 500: _failed},
        lifespan=lifespan,
    )
    # A path with a slash too many is no page: redirecting would repeat the token in a header.
    application.router.redirect_slashes = False
    return _WithHeaders(application)


class _WithHeaders:
    """Adds the headers of every response, errors included."""

    def __init__(self, application: ASGIApp):
        self._application = application
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._application(scope, receive, send_more)


async def _static(request: Request) -> Response:
    found = asset(request.path_params["name"])
    if not found:
        raise HTTPException(404)
    return Response(found.content, media_type=found.media_type)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = page("refused.html", status=error.status_code)
    return HTMLResponse(text, error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    """Answer what should not happen, such as a full disk; the server's log has the reason."""
    return HTMLResponse(page("refused.html", status=500), 500)


class _Site:
    """Handles requests; one thread of its own works on the database.

    An answer is synced to the disk before its participant is told, which takes milliseconds in
    which the other participants must not wait.
    """

    def __init__(self, folder: StudyFolder, clock: Clock):
        self._design, self._clock = folder.design, clock
        self._participants = {each.id: each for each in folder.design.participants}
        self._images = [png(image, LARGEST_IMAGE) for image in folder.images()]
        self._answers = Answers(folder.answers, folder.id)
        self._thread = ThreadPoolExecutor(1, "answers")
        self._started = clock()

    def close(self) -> None:
        self._thread.shutdown()
        self._answers.close()

    async def current(self, request: Request) -> Response:
        """Show the page of where a participant is: consent, a trial, thanks, or withdrawn."""
        state, began = await self._database(self._show, request.path_params["token"])
        return HTMLResponse(self._page(request.path_params["token"], state, began))

    async def image(self, request: Request) -> Response:
        """Serve an image of the trial that a participant sees now, and no other."""
        token, place, slot = (request.path_params[name] for name in ("token", "place", "slot"))
        state = await self._database(self._state, token)
        participant = self._participants[state.id]
        if not _answers_now(state, participant) or place != state.answered:
            raise HTTPException(404)
        trial, item = self._trial(participant, place)
        # Slot 0 is the image of the question, the options follow in the order of this trial.
        shown = [item.image, *(item.options[option] for option in trial.order)]
        if slot >= len(shown):
            raise HTTPException(404)
        return Response(self._images[shown[slot]], media_type="image/png")

    async def consent(self, request: Request) -> Response:
        token, form = request.path_params["token"], await _form(request)
        state = await self._database(self._state, token)
        if form.get("agree") != "yes":
            raise HTTPException(400)
        await self._database(self._answers.consent, state.id, self._clock())
        return _back(token)

    async def answer(self, request: Request) -> Response:
        """Keep an answer, once; a repeated one leads to where the participant is."""
        token, form = request.path_params["token"], await _form(request)
        state = await self._database(self._state, token)
        participant = self._participants[state.id]
        place = _number(form.get("place"), len(participant.trials))
        if state.withdrawn or not state.consented or place > state.answered:
            raise HTTPException(409)
        if place == state.answered:
            trial, item = self._trial(participant, place)
            choice, position = _chosen(form.get("choice"), trial, item)
            answer = Answer(state.id, place, choice, position, 0.0)
            await self._database(self._record, answer, item)
        return _back(token)

    async def stop(self, request: Request) -> Response:
        token = request.path_params["token"]
        state = await self._database(self._state, token)
        if state.withdrawn or not state.consented:
            return _back(token)
        return HTMLResponse(page("stop.html", token=token, answered=state.answered))

    async def withdraw(self, request: Request) -> Response:
        token, form = request.path_params["token"], await _form(request)
        state = await self._database(self._state, token)
        if form.get("delete") != "yes":
            raise HTTPException(400)
        await self._database(self._answers.withdraw, state.id, self._clock())
        return _back(token)

    async def _database(self, work: Callable[..., T], *values: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *values)

    def _state(self, token: str) -> State:
        state = self._answers.state(token)
        if state is None:
            raise HTTPException(404)
        return state

    def _show(self, token: str) -> tuple[State, float]:
        """Return where a participant is, and when the time of their trial began."""
        state = self._state(token)
        participant = self._participants[state.id]
        while _answers_now(state, participant):
            now, (_, item) = self._clock(), self._trial(participant, state.answered)
            began = self._answers.show(state.id, state.answered, now, since=self._started)
            if not self._late(item, now - began):
                return state, began
            # The time is over, and a reload does not give it back.
            late = Answer(state.id, state.answered, None, None, now - began)
            self._answers.record(late, now)
            state = self._state(token)
        return state, 0.0

    def _record(self, answer: Answer, item: Item) -> None:
        now, began = self._clock(), self._answers.shown_at(answer.participant, answer.place)
        if began is None:
            raise HTTPException(409)  # nobody can judge what they were not shown
        seconds = max(0.0, now - began)
        # While the server was down the clock of the page went on, and that is nobody's fault.
        late = began >= self._started and self._late(item, seconds)
        choice, position = (None, None) if late else (answer.choice, answer.position)
        self._answers.record(
            Answer(answer.participant, answer.place, choice, position, seconds), now
        )

    def _late(self, item: Item, seconds: float) -> bool:
        return item.protocol == "pairwise" and seconds > self._design.seconds + GRACE

    def _trial(self, participant: Participant, place: int) -> tuple[Trial, Item]:
        trial = participant.trials[place]
        return trial, self._design.items[trial.item]

    def _page(self, token: str, state: State, began: float) -> str:
        participant = self._participants[state.id]
        trials = len(participant.trials)
        if state.withdrawn:
            return page("withdrawn.html")
        common = {"token": token, "trials": trials, "protocol": participant.protocol}
        if not state.consented:
            design = self._design
            return page("consent.html", **common, seconds=design.seconds, contact=design.contact)
        if state.answered >= trials:
            return page("thanks.html", **common)
        left = max(0.0, self._design.seconds - (self._clock() - began))
        return page(
            f"{participant.protocol}.html",
            **common,
            place=state.answered,
            seconds=self._design.seconds,
            left=f"{left:.1f}",
        )


def _answers_now(state: State, participant: Participant) -> bool:
    """Is a trial of this participant open?"""
    return state.consented and not state.withdrawn and state.answered < len(participant.trials)


def _chosen(text: str | None, trial: Trial, item: Item) -> tuple[int | None, int | None]:
    """Return the option and the position that a form names; None when the time is over."""
    if item.protocol == "pairwise" and text == "timeout":
        return None, None
    if item.protocol == "identification" and text == "none":
        return item.none, item.none
    position = _number(text, item.none)
    return trial.order[position], position


def _number(text: str | None, end: int) -> int:
    """Parse a number below `end`; anything else is no form of ours."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 6):
        raise HTTPException(400)
    if int(text) >= end:
        raise HTTPException(400)
    return int(text)


async def _form(request: Request) -> dict[str, str]:
    """Read a small form; the first value of each name."""
    if request.headers.get("content-type", "").partition(";")[0] != (
        "application/x-www-form-urlencoded"
    ):
        raise HTTPException(415)
    body = b""
    try:
        async with asyncio.timeout(SLOWEST_FORM):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_FORM:
                    raise HTTPException(413, headers={"connection": "close"})
    except TimeoutError:
        raise HTTPException(408, headers={"connection": "close"}) from None
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=8)
    except ValueError:
        raise HTTPException(400) from None
    return {name: values[0] for name, values in fields.items()}


def _back(token: str) -> Response:
    """Lead to the page of where the participant is; a reload of that sends no form again."""
    return RedirectResponse(f"/p/{token}", 303)
