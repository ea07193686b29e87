"""The HTTP example as a hostile or slow client sees it."""

import json
import runpy
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from frostglass.deploy.server import Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_inference.py"
SHAPE = (2, 2, 2)
SECONDS = 1.0


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def port(program):
    rest = nn.Sequential(nn.Flatten(), nn.Linear(8, 2)).eval()
    nn.init.zeros_(rest[1].weight)
    rest[1].bias.data = torch.tensor([5.0, -5.0])
    server = Server(rest, ("glasses", "beard"), (3, 8, 8), SHAPE, "stage1", attributes=True)
    running = program["service"](server, SECONDS)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running.server_port
    running.shutdown()


def post(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}", data=body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def send(port, text):
    """Send raw bytes; return what comes back until the server disconnects."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(text)
        return b"".join(iter(lambda: line.recv(4096), b""))


def features(count=1):
    return save({"features": torch.zeros(count, *SHAPE)})


def test_silent_clients_keep_nobody_waiting(port):
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    silent[1].sendall(b"POST / HTTP/1.1\r\nContent-Length: 90\r\n\r\nabc")
    begin = time.monotonic()
    assert post(port, features(2)) == (200, [{"glasses": 0.993}] * 2)
    assert time.monotonic() - begin < SECONDS
    for line in silent:
        line.settimeout(10)
        assert line.recv(100) == b"", "a silent client is disconnected"
        line.close()


def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10000\r\n\r\n")
        begin = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - begin < 5 * SECONDS:
                line.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - begin < 4 * SECONDS


def test_requests_that_are_too_large_are_refused_before_they_are_read(port, program):
    largest = 4 * program["MOST_IMAGES"] * 8 + program["HEADER_BYTES"]
    for length in (largest + 1, 10**30, "9" * 5000):
        answer = send(port, f"POST / HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
        assert b" 413 " in answer
        assert f"at most {largest} bytes are accepted".encode() in answer
    assert post(port, features(program["MOST_IMAGES"]))[0] == 200


@pytest.mark.parametrize(
    "length", [b"", b"Content-Length: -3\r\n", "Content-Length: ٣\r\n".encode()]
)
def test_requests_without_a_length_are_refused(port, length):
    assert b" 411 " in send(port, b"POST / HTTP/1.1\r\n" + length + b"\r\n")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"x" * 100, save({"other": torch.zeros(1)}), save({"features": torch.zeros(1, 3)}),
        save({"features": torch.full((1, *SHAPE), torch.nan)}),
        save({"features\r\nX: y": torch.zeros(1)}),
    ],
)  # fmt: skip
def test_a_body_that_holds_no_features_is_refused(port, body):
    code, text = post(port, body)
    assert code == 400
    assert "expected one tensor named features" in text
