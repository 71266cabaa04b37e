"""An Attention process without vLLM: attach over the socket, post for ever, check every result; one line a round.

Arguments: model directory, address of F, GPU, instance, rows. Prints ``ok ROUND``, or what went wrong.
"""

import logging
import sys
from pathlib import Path

import torch

from ffn_faas.attention.session import AttentionSession, DataPlane
from ffn_faas.connectors import m2n_library
from ffn_faas.connectors.host_identity import host_identity
from ffn_faas.connectors.m2n_client import M2nClient
from ffn_faas.experts.dummy import DummyWeights
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Attach


def main(model, address, gpu, instance, rows):
    spec = MoESpec.from_model_dir(Path(model))
    library = m2n_library.load()
    device = library.devices()[gpu]
    torch.cuda.set_device(gpu)
    made = {}

    def make_client(geometry, grants):
        made["client"] = M2nClient(library, device, geometry, grants[0].expert_counts, timeout_s=20.0)
        return made["client"]

    def fetch(offer, geometry, epoch, timeout):
        return made["client"].fetch(offer, geometry, epoch, timeout)

    plane = DataPlane(make_client, fetch, spec.hidden_size, spec.top_k, 2)
    attach = Attach(
        protocol_version=PROTOCOL_VERSION,
        software_version="test",
        peer="test",
        instance=instance,
        attention_rank=0,
        num_attention_ranks=1,
        stages=1,
        capacity=rows,
        transport="m2n",
        host=host_identity(),
        fingerprint=fingerprint(spec, None),
    )
    session = AttentionSession(address, attach, plane, logging.getLogger("attention"))
    session.attach(60.0)
    session.declare_layers(list(spec.layers))
    session.wait_ready(60.0)
    post_for_ever(spec, made["client"], rows)


def post_for_ever(spec, client, rows):
    wide, narrow = dummy_weights(spec)
    stream = torch.cuda.Stream()
    generator = torch.Generator(device="cuda").manual_seed(1)
    turn = 0
    while True:
        layer = turn % spec.num_layers
        x = torch.randn(rows, spec.hidden_size, device="cuda", generator=generator).bfloat16()
        logits = torch.randn(rows, spec.num_experts, device="cuda", generator=generator)
        weights, ids = torch.softmax(logits, -1).topk(spec.top_k, -1)
        ids, weights, out = ids.int(), weights.contiguous(), torch.full_like(x, float("nan"))
        torch.cuda.synchronize()
        where = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        client.attention.dispatch(0, client.layers[layer], *where, rows, stream.cuda_stream)
        client.attention.receive(0, out.data_ptr(), rows, stream.cuda_stream)
        stream.synchronize()
        if client.attention.status(0) != "fine":
            sys.exit(f"wait {client.attention.status(0)}: {client.reason}")
        gate, up = torch.einsum("th,eih->tei", x.double(), wide[layer]).chunk(2, -1)
        every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, narrow[layer])
        scales = torch.zeros(rows, spec.num_experts, dtype=torch.float64, device="cuda")
        expected = torch.einsum("teh,te->th", every, scales.scatter_(1, ids.long(), weights.double()))
        gap = float((out.double() - expected).norm() / expected.norm())
        if not gap < 4e-3:
            sys.exit(f"round {turn}: error {gap}")
        print(f"ok {turn}", flush=True)
        turn += 1


def dummy_weights(spec):
    """Of all layers, float64 on the GPU: [layers, E, 2I, H] and [layers, E, H, I]."""
    dummy = DummyWeights(spec, 0)
    inter, hidden = spec.intermediate_size, spec.hidden_size
    wide = torch.empty(spec.num_layers, spec.num_experts, 2 * inter, hidden, dtype=torch.bfloat16)
    narrow = torch.empty(spec.num_layers, spec.num_experts, hidden, inter, dtype=torch.bfloat16)
    for layer in range(spec.num_layers):
        for expert in range(spec.num_experts):
            own = wide[layer, expert]
            for matrix, buffer in enumerate((own[:inter], own[inter:], narrow[layer, expert])):
                dummy.fill(buffer, layer, expert, matrix)
    return wide.double().cuda(), narrow.double().cuda()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
