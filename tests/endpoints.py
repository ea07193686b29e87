"""A small classifier behind HTTP, for tests: honest, or with any answer."""

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import torch
from PIL import Image


def pixels_of(body):
    """Return the images of a request as floats in [0, 1], (N, C, H, W)."""
    files = [base64.b64decode(text) for text in json.loads(body)["images"]]
    arrays = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255


@contextmanager
def serving(answer) -> Iterator[str]:
    """Serve `answer(body, headers)`, which returns a status and bytes, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, content = answer(body, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/classify"
    finally:
        server.shutdown()
        server.server_close()


def answering(module, kind="scores", *, probabilities=True):
    """Return the answers of a network: scores (probabilities or logits), or labels."""

    def answer(body, headers):
        with torch.no_grad():
            logits = module(pixels_of(body))
        values = logits.softmax(1) if probabilities else logits
        found = values if kind == "scores" else logits.argmax(1)
        return 200, json.dumps({kind: found.tolist()}).encode()

    return answer
