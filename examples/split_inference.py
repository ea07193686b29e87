"""Split inference over HTTP: a client sends protected features, and never a picture; a server answers what it sees.

Here both run in one process on localhost, with a small network trained on procedural faces that tells attributes such as glasses or a beard. Run it with
`python examples/split_inference.py`; it takes a few minutes.
"""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from frostglass import make_split
from frostglass.core.errors import FrostglassError
from frostglass.data.faces import Faces
from frostglass.defenses.release.crafter import Crafter
from frostglass.deploy.client import Client, Server, split_model
from frostglass.priors.pretrained import Pretrained
from frostglass.training.loop import train_target
from frostglass.training.settings import Training


def service(server: Server) -> HTTPServer:
    """A web service that knows the second half of the network and nothing else."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                features = load(self.rfile.read(int(self.headers["Content-Length"])))["features"]
                chances = server.answer(features).sigmoid()
            except (FrostglassError, SafetensorError, KeyError) as error:
                self.send_error(400, f"one tensor named features is expected: {error}")
                return
            told = [
                {name: round(p, 3) for name, p in zip(server.classes, row, strict=True) if p > 0.5}
                for row in chances.tolist()
            ]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None:
            pass

    return HTTPServer(("127.0.0.1", 0), Answers)


def ask(client: Client, pictures: torch.Tensor, address: str) -> list[dict[str, float]]:
    """What runs on the device: pictures in, answers back; only protected features are sent."""
    body = save({"features": client.protect(pictures).contiguous()})
    with urllib.request.urlopen(
        urllib.request.Request(address, data=body, method="POST")
    ) as answer:
        return json.loads(answer.read())


def main(people: int = 30, epochs: int = 15, steps: int = 30) -> float:
    split = make_split(
        Faces(identities=people, images=40, public_identities=200, public_images=1),
        test_fraction=0.2,
        validation_fraction=0.1,
        seed=0,
    )
    target = train_target(
        Training(model="cnn", attributes=("all",), cut="stage1", epochs=epochs), split
    )
    client, server = split_model(
        target, Crafter(beta=1.0, steps=steps), prior=Pretrained().read(split.train.shape)
    )

    running = service(server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    victims = split.test.at(
        torch.stack([(split.test.labels == person).nonzero()[0, 0] for person in range(8)])
    )  # a picture each
    answers = ask(client, victims.floats(), f"http://127.0.0.1:{running.server_port}")
    running.shutdown()

    right = 0.0
    truth = [
        {server.classes[place] for place in row.nonzero().flatten().tolist()}
        for row in victims.attributes
    ]
    for name, told, has in zip(victims.sources, answers, truth, strict=True):
        print(
            f"{name}: told {', '.join(told) or 'nothing'}; true {', '.join(sorted(has)) or 'nothing'}"
        )
        right += 1 - len(set(told) ^ has) / len(server.classes)
    print(f"right on {right / len(answers):.0%} of the attributes, from protected features alone")
    return right / len(answers)


if __name__ == "__main__":
    main()
