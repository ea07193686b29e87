"""Split inference over HTTP: a client sends protected features, never an image; a server answers.

Both run in one process on localhost, with a small network that predicts attributes of procedural
faces, such as glasses or a beard. Run it with `python examples/split_inference.py`; it takes a few
minutes.
"""

import json
import threading
import urllib.request
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import frostglass as fg
from frostglass.data import Faces
from frostglass.defenses import Crafter
from frostglass.priors import Pretrained


def service(server: fg.Server) -> HTTPServer:
    """Return a web service that has only the second half of the network."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                features = load(self.rfile.read(int(self.headers["Content-Length"])))["features"]
                probabilities = server.answer(features).sigmoid().tolist()
            except (fg.FrostglassError, SafetensorError, KeyError) as error:
                self.send_error(400, f"expected one tensor named features: {error}")
                return
            predicted = [
                {name: round(p, 3) for name, p in zip(server.classes, row, strict=True) if p > 0.5}
                for row in probabilities
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(predicted).encode())

        def log_message(self, *_: object) -> None:
            pass

    return HTTPServer(("127.0.0.1", 0), Handler)


def ask(client: fg.Client, images: torch.Tensor, address: str) -> list[dict[str, float]]:
    """Run on the device: send protected features of images, return the server's answers."""
    body = save({"features": client.protect(images).contiguous()})
    request = urllib.request.Request(address, data=body, method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


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
