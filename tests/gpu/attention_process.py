"""An Attention process without vLLM: attach over the socket, post for ever, check every result; one line a round.

Arguments: model directory, address of F, GPU, instance, rows; then ``graph`` to replay a captured graph of posts
instead of launching them, ``reattach_timeout_s`` and how long an answer may take. Prints
``ok ROUND``, or what went wrong.
"""

import logging
import sys
from pathlib import Path

import torch

from ffn_faas.attention import device_ops
from ffn_faas.attention.data_plane import device_memory
from ffn_faas.attention.remote_experts import run_remote
from ffn_faas.attention.session import AttentionSession, LossPolicy
from ffn_faas.connectors.host_identity import host_identity
from ffn_faas.experts.dummy import DummyWeights
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol import PROTOCOL_VERSION
from ffn_faas.protocol.messages import Attach


def main(model, address, gpu, instance, rows, way="eager", reattach_timeout_s="0", answer_s="20"):
    spec, rows = MoESpec.from_model_dir(Path(model)), int(rows)
    torch.cuda.set_device(int(gpu))
    plane = device_memory(spec, int(gpu), lethal=True)
    attach = Attach(
        protocol_version=PROTOCOL_VERSION,
        software_version="test",
        peer="test",
        instance=instance,
        attention_rank=0,
        num_attention_ranks=1,
        stages=1,
        capacity=max(1, rows - rows // 3),
        transport="m2n",
        host=host_identity(),
        fingerprint=fingerprint(spec, None),
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    policy = LossPolicy(float(reattach_timeout_s), float(answer_s))
    session = AttentionSession(address, attach, plane, logging.getLogger("attention"), policy)
    session.attach(60.0)
    session.declare_layers(list(spec.layers))
    session.wait_ready(60.0)
    device_ops.bind(session.client)
    post_for_ever(spec, rows, captured=way == "graph")


def post_for_ever(spec, rows, *, captured):
    wide, narrow = dummy_weights(spec)
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.empty(rows, spec.hidden_size, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(rows, spec.num_experts, device="cuda")

    def layers():
        weights, ids = torch.softmax(logits, -1).topk(spec.top_k, -1)
        ids = ids.int()
        outs = [run_remote(torch.ops.ffn_faas, layer, x, weights, ids, None) for layer in range(spec.num_layers)]
        return weights, ids, outs

    draw(x, logits, generator)
    graph = torch.cuda.CUDAGraph()
    results = layers()
    if captured:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = layers()
    turn = 0
    while True:
        draw(x, logits, generator)
        if captured:
            graph.replay()
        else:
            results = layers()
        weights, ids, outs = results
        scales = torch.zeros(rows, spec.num_experts, dtype=torch.float64, device="cuda")
        scales.scatter_(1, ids.long(), weights.double())
        for layer, out in enumerate(outs):
            gate, up = torch.einsum("th,eih->tei", x.double(), wide[layer]).chunk(2, -1)
            every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, narrow[layer])
            expected = torch.einsum("teh,te->th", every, scales)
            gap = float((out.double() - expected).norm() / expected.norm())
            if not gap < 4e-3:
                empty = int((out == 0).all(1).sum())
                norms = f"norm {float(out.double().norm()):.3g} for {float(expected.norm()):.3g}"
                sys.exit(f"round {turn}: layer {layer}: error {gap}, {empty} of {rows} rows are zeros, {norms}")
        print(f"ok {turn}", flush=True)
        turn += 1


def draw(x, logits, generator):
    x.normal_(generator=generator)
    logits.normal_(generator=generator)


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
                dummy.write(buffer.data_ptr(), layer, expert, matrix)
    return wide.double().cuda(), narrow.double().cuda()


if __name__ == "__main__":
    main(*sys.argv[1:])
