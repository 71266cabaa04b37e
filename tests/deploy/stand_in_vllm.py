"""Takes the place of vLLM's API server behind its very command line: a session with a real F, and no model.

``GET /health`` as vLLM has it; ``POST /v1/completions`` with ``{"rounds": N}`` answers the digests of N batches that
went through F (tests.attention.attention_process).
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ffn_faas import env
from ffn_faas.afd_block import AfdBlock
from ffn_faas.attention import data_plane
from ffn_faas.attention.loader import Model, attach_message
from ffn_faas.attention.session import AttentionSession, LossPolicy
from ffn_faas.credentials import Credentials
from tests.attention.attention_process import answer


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--additional-config", "--load-format"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--port", type=int, required=True)
    args, _ = parser.parse_known_args()
    model = Model.read(args.model, None, "bfloat16", dummy=False)
    block = AfdBlock.from_additional_config(json.loads(args.additional_config), role="attention")
    assert block is not None
    attach = attach_message(block, model, "a stand-in for vLLM", 64)
    policy = LossPolicy(block.connector_extra_config.reattach_timeout_s)
    session = AttentionSession(
        f"{block.host}:{block.port}", attach, data_plane.shared_memory(model.spec), logging.getLogger(), policy
    )
    session.attach(block.attach_timeout_s, Credentials(env.token()))
    session.declare_layers(list(model.spec.layers))
    session.wait_ready(block.attach_timeout_s)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            rounds = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rounds"]
            self._reply([answer(session.client, model.spec, number) for number in range(rounds)])

        def _reply(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((args.host, args.port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.05)
    session.close()


if __name__ == "__main__":
    main()
