"""A classifier behind an address: what it answers, and what it must not answer."""

import json
import time

import pytest
import torch
from torch import nn

from endpoints import answering, pixels_of, serving
from frostglass.core.errors import ConfigError, RunError
from frostglass.models import endpoint as module
from frostglass.models.endpoint import Endpoint, EndpointSettings

SHAPE = (3, 8, 8)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)


def bytes_as_images(count):
    """Images that survive 8 bits."""
    return torch.randint(0, 256, (count, *SHAPE)).float() / 255


def test_images_arrive_as_they_are():
    seen = []

    def answer(body, headers):
        seen.append(pixels_of(body))
        return 200, json.dumps({"labels": [0] * len(seen[-1])}).encode()

    images = bytes_as_images(7)
    with serving(answer) as url:
        Endpoint(url, 5, EndpointSettings(batch=3))(images)
    assert [len(part) for part in seen] == [3, 3, 1]
    assert torch.allclose(torch.cat(seen), images, atol=1e-6)


@pytest.mark.parametrize("probabilities", [True, False])
def test_scores_become_what_a_softmax_turns_into_probabilities(network, probabilities):
    images = bytes_as_images(4)
    with serving(answering(network, probabilities=probabilities)) as url:
        answers = Endpoint(url, 5, EndpointSettings())(images)
    assert torch.allclose(answers.softmax(1), network(images).softmax(1), atol=1e-5)


def test_labels_are_certain(network):
    images = bytes_as_images(4)
    with serving(answering(network, "labels")) as url:
        endpoint = Endpoint(url, 5, EndpointSettings())
        answers = endpoint(images)
    assert torch.equal(answers.argmax(1), network(images).argmax(1))
    assert answers.isfinite().all()
    assert endpoint.answered == "labels"


def test_a_busy_endpoint_is_asked_again(network):
    times = []
    honest = answering(network)

    def answer(body, headers):
        times.append(1)
        return (503, b"") if len(times) < 3 else honest(body, headers)

    with serving(answer) as url:
        assert Endpoint(url, 5, EndpointSettings(retries=2))(bytes_as_images(2)).shape == (2, 5)
    assert len(times) == 3


def test_attempts_are_bounded():
    times = []

    def answer(body, headers):
        times.append(1)
        return 503, b""

    with serving(answer) as url, pytest.raises(RunError, match="no answer in 3 attempts"):
        Endpoint(url, 5, EndpointSettings(retries=2))(bytes_as_images(1))
    assert len(times) == 3


def test_a_refusal_is_not_repeated():
    times = []

    def answer(body, headers):
        times.append(1)
        return 401, b""

    with serving(answer) as url, pytest.raises(RunError, match="refused a request: 401"):
        Endpoint(url, 5, EndpointSettings())(bytes_as_images(1))
    assert len(times) == 1


def test_a_slow_endpoint_ends_in_an_error():
    def answer(body, headers):
        time.sleep(1)
        return 200, b"{}"

    settings = EndpointSettings(timeout=0.05, retries=1)
    with serving(answer) as url, pytest.raises(RunError, match="no answer in 2 attempts"):
        Endpoint(url, 5, settings)(bytes_as_images(1))


def test_an_endpoint_that_is_not_there():
    settings = EndpointSettings(retries=0)
    with pytest.raises(RunError, match="start it, or raise"):
        Endpoint("http://127.0.0.1:1/x", 5, settings)(bytes_as_images(1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "answered '<html>': expected"),
        (b"[1]", "expected"),
        (b"3", "expected"),
        (b'{"scores": "many"}', "expected"),
        (b'{"scores": [[1, 2], [3]]}', "expected"),
        (b'{"scores": [[1, 2, 3, 4]]}', r"scores \(1, 4\) for 1 images"),
        (b'{"scores": [[1, 2, 3, 4, NaN]]}', "expected finite numbers"),
        (b'{"labels": [5]}', "whole numbers from 0 to 4"),
        (b'{"labels": [0.5]}', "whole numbers from 0 to 4"),
        (b'{"labels": [0, 1]}', r"labels \(2,\) for 1 images"),
        (b"[" * 100_000, "expected"),
    ],
)
def test_answers_that_make_no_sense(content, message):
    with serving(lambda *_: (200, content)) as url, pytest.raises(RunError, match=message):
        Endpoint(url, 5, EndpointSettings())(bytes_as_images(1))


def test_scores_and_then_labels_are_refused(network):
    kinds = iter(["scores", "labels"])

    def answer(body, headers):
        return answering(network, next(kinds))(body, headers)

    with serving(answer) as url, pytest.raises(RunError, match="labels after scores"):
        Endpoint(url, 5, EndpointSettings(batch=1))(bytes_as_images(2))


def test_a_token_comes_from_the_environment(network, monkeypatch):
    seen = []
    honest = answering(network)

    def answer(body, headers):
        seen.append(headers["Authorization"])
        return honest(body, headers)

    with serving(answer) as url:
        endpoint = Endpoint(url, 5, EndpointSettings(token="SECRET"))
        with pytest.raises(ConfigError, match="no environment variable SECRET"):
            endpoint(bytes_as_images(1))
        monkeypatch.setenv("SECRET", "abc")
        endpoint(bytes_as_images(1))
    assert seen == ["Bearer abc"]


@pytest.mark.parametrize(
    ("url", "message"),
    [("http:///x", "expected an address"), ("https://me:pass@host/x", "has a password")],
)
def test_addresses_that_are_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        Endpoint.check(url)


def test_a_dry_run_asks_nobody():
    images = torch.empty(3, *SHAPE, device="meta")
    assert Endpoint("http://127.0.0.1:1/x", 5, EndpointSettings())(images).shape == (3, 5)
