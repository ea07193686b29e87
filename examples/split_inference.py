"""Split inference over HTTP: a client sends protected features, never an image; a server answers.

Both run in one process on localhost, with a small network that predicts attributes of procedural
faces, such as glasses or a beard. Run it with `python examples/split_inference.py`; it takes a few
minutes.
"""

import json
import math
import threading
import time
import urllib.request
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import frostglass as fg
from frostglass.data import Faces
from frostglass.defenses import Crafter
from frostglass.priors import Pretrained

SECONDS = 30.0  # for one request; a client that is slower is disconnected
MOST_IMAGES = 64  # in one request
HEADER_BYTES = 10_000  # room for what safetensors writes beside the features


def service(server: fg.Server, seconds: float = SECONDS) -> ThreadingHTTPServer:
    """Return a web service that has only the second half of the network.

    It serves several clients at once: one that is slow or silent keeps nobody waiting.
    """
    largest = 4 * MOST_IMAGES * math.prod(server.feature_shape) + HEADER_BYTES
    computing = threading.Lock()  # one answer at a time uses all cores anyway

    class Handler(BaseHTTPRequestHandler):
        timeout = seconds  # of each read and write

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()):
                return self.send_error(411, explain="a request needs a Content-Length")
            if len(length) > 12 or int(length) > largest:
                return self.send_error(413, explain=f"at most {largest} bytes are accepted")
            try:
                features = load(self._body(int(length)))["features"]
                with computing:
                    probabilities = server.answer(features).sigmoid().tolist()
            except (fg.FrostglassError, SafetensorError, KeyError) as error:
                return self.send_error(400, explain=f"expected one tensor named features: {error}")
            predicted = [
                {name: round(p, 3) for name, p in zip(server.classes, row, strict=True) if p > 0.5}
                for row in probabilities
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(predicted).encode())

        def _body(self, length: int) -> bytes:
            """Read the request; a client that sends a byte now and then is late too."""
            body, deadline = b"", time.monotonic() + seconds
            while len(body) < length:
                part = self.rfile.read1(min(length - len(body), 1 << 16))
                if not part or time.monotonic() > deadline:
                    raise TimeoutError("the request did not arrive in time")  # ends the connection
                body += part
            return body

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def ask(client: fg.Client, images: torch.Tensor, address: str) -> list[dict[str, float]]:
    """Run on the device: send protected features of images, return the server's answers."""
    answers = []
    for part in client.protect(images).split(MOST_IMAGES):
        body = save({"features": part.contiguous()})
        request = urllib.request.Request(address, data=body, method="POST")
        with urllib.request.urlopen(request, timeout=2 * SECONDS) as answer:
            answers += json.loads(answer.read())
    return answers


def main(people: int = 30, epochs: int = 15, steps: int = 30) -> float:
    data = Faces(identities=people, images=40, public_identities=200, public_images=1)
    split = fg.make_split(data, test_fraction=0.2, validation_fraction=0.1, seed=0)
    training = fg.Training(model="cnn", attributes=("all",), cut="stage1", epochs=epochs)
    target = fg.train_target(training, split)
    prior = Pretrained().train(split.public)
    client, server = fg.split_model(target, Crafter(beta=1.0, steps=steps), prior=prior)

    running = service(server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    first = [(split.test.labels == person).nonzero()[0, 0] for person in range(min(8, people))]
    victims = split.test.at(torch.stack(first))  # one image of each person
    answers = ask(client, victims.floats(), f"http://127.0.0.1:{running.server_port}")
    running.shutdown()

    correct = 0.0
    for name, predicted, row in zip(victims.sources, answers, victims.attributes, strict=True):
        true = {server.classes[place] for place in row.nonzero().flatten().tolist()}
        print(f"{name}: predicted {_words(predicted)}; true {_words(sorted(true))}")
        correct += 1 - len(set(predicted) ^ true) / len(server.classes)
    share = correct / len(answers)
    print(f"{share:.0%} of the attributes are correct, from protected features alone")
    return share


def _words(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


if __name__ == "__main__":
    main()
