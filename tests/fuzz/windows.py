"""Mutated window contents and mutated streams against a real receiver; another session must stay exact.

python -m tests.fuzz.windows --count 100000 --seed 0 --over shm        (or tcp)
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import struct
import time
from collections import Counter

import numpy as np

from ffn_faas import native
from ffn_faas.connectors.shm import native_geometry
from ffn_faas.protocol.stream import ANSWER, POST
from ffn_faas.protocol.window import flag, window_layout
from tests.fuzz.mutate import mutate_bytes, overwrite_words
from tests.fuzz.report import Held
from tests.native.world import World, answer, batch, oracle

EPOCH = 9
EXPERTS, TOP_K, HIDDEN, CAPACITY, LAYERS = 3, 2, 4, 4, 2
CHECK_EVERY = 50
PATIENCE_US = 200
"""For what travels through a thread of the connection: that needs a core as well."""


class Target:
    """One F rank stepped by this thread, a good session on it, and one hostile link at a time."""

    def __init__(self) -> None:
        self.world = World([EXPERTS], top_k=TOP_K, hidden_size=HIDDEN, capacity=CAPACITY, merge_wait_us=0)
        self.world.ranks[0].close()
        self.receiver = self.world.ranks[0].receiver
        self.receiver.cancel()
        self.shape = native_geometry(self.world.geometry)
        self.layout = window_layout(self.world.geometry)
        self.outcomes: Counter[str] = Counter()
        self.key = 0
        self.rng = np.random.default_rng(0)

    def step(self, patience_us: int = 0) -> int:
        """Compute all that is there, or comes within ``patience_us``; the number of items."""
        done = 0
        while (item := self.receiver.receive(0 if done else patience_us)) is not None:
            with np.errstate(all="ignore"):
                answer(item, 0, "float32")
            item.complete()
            done += 1
        return done

    def check_other(self) -> None:
        """The good session's answer is exact, whatever lies in the hostile windows."""
        x, ids, weights = batch(self.rng, CAPACITY, self.world)
        out = np.full_like(x, np.nan)
        call = self.world.call(x, ids, weights)
        self.world.client.dispatch(call)
        deadline = time.monotonic() + 10
        while not self.step():
            if time.monotonic() > deadline:
                raise AssertionError("the good session's post was not taken")
        # What a hostile link posted meanwhile may have come first.
        self.step()
        self.world.client.combine(call, out.ctypes.data)
        np.testing.assert_array_equal(out, oracle(0, x, ids, weights))

    def faults(self) -> bool:
        found = self.receiver.take_faults()
        for link, reason in found:
            if link != self.key:
                raise AssertionError(f"link {link} was closed for what link {self.key} did: {reason}")
            self.outcomes[" ".join(word for word in reason.split() if not word.lstrip("-").isdecimal())] += 1
        return bool(found)

    def close(self) -> None:
        self.world.__exit__()


def good_post(rng: random.Random, sequence: int) -> tuple[int, int, bytes]:
    """Layer, rows and the bytes after the head of a stream's post."""
    rows = rng.randint(0, CAPACITY)
    ids = [rng.randint(-1, EXPERTS - 1) for _ in range(rows * TOP_K)]
    floats = [rng.uniform(-2, 2) for _ in range(rows * (TOP_K + HIDDEN))]
    return rng.randrange(LAYERS), rows, struct.pack(f"<{len(ids)}i{len(floats)}f", *ids, *floats)


class SharedMemory:
    """A hostile link in shared memory: a post is written, words of the whole arena are overwritten, F rings."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.open()

    def open(self) -> None:
        target = self.target
        target.receiver.remove_link(target.key) if target.key else None
        target.key += 1
        arena = native.load().Arena.create(target.shape, EPOCH)
        target.receiver.add_link(target.key, arena, [EXPERTS] * LAYERS)
        self.memory, self.sequence = arena.view(), 0

    def strike(self, rng: random.Random) -> None:
        layout, memory = self.target.layout, self.memory
        self.sequence += 1
        layer, rows, body = good_post(rng, self.sequence)
        stage = layout.stage(0)
        struct.pack_into("<ii", memory, stage + layout.dispatch_layer, layer, rows)
        ids = rows * TOP_K * 4
        memory[stage + layout.dispatch_ids : stage + layout.dispatch_ids + ids] = body[:ids]
        begin, end = (0, len(memory)) if rng.random() < 0.3 else (stage, stage + layout.dispatch_hidden)
        overwrite_words(memory[begin:end], rng, rng.randint(0, 6))
        if rng.random() < 0.5:
            overwrite_words(memory[stage + layout.dispatch_layer : stage + layout.dispatch_layer + 8], rng, 1)
        number = flag(EPOCH, self.sequence) if rng.random() < 0.9 else rng.randrange(2**64)
        struct.pack_into("<Q", memory, stage + layout.dispatch_flag, number)
        os.write(self.target.receiver.doorbell, struct.pack("<Q", 1))
        taken = self.target.step()
        self.target.outcomes["computed"] += taken
        if self.target.faults() or not taken:
            self.open()


class Stream:
    """A hostile link over TCP: a few posts as a stream of bytes that was mutated."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def strike(self, rng: random.Random) -> None:
        target = self.target
        target.key += 1
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        arena = native.load().Arena.create(target.shape, EPOCH)
        target.receiver.add_link(target.key, arena, [EXPERTS] * LAYERS)
        mirror = native.load().ServiceMirror(far.detach(), arena, target.receiver, target.key)
        near.settimeout(10)
        sent, ends, answers = b"", [], []
        for sequence in range(1, rng.randint(1, 3) + 1):
            layer, rows, body = good_post(rng, sequence)
            sent += POST.pack(flag(EPOCH, sequence), 0, layer, rows, 0) + body
            ends.append(len(sent))
            answers.append(ANSWER.size + rows * HIDDEN * 4)
        mutated = mutate_bytes(sent, rng)
        # Posts and answers alternate, and F drops what it has not taken when a stream fails or ends: the posts before
        # the mutation are answered first.
        spared = [end for end in ends if mutated[:end] == sent[:end]]
        deadline = time.monotonic() + 10
        for begin, end, nbytes in zip([0, *spared], spared, answers, strict=False):
            near.sendall(mutated[begin:end])
            while not target.step(PATIENCE_US):
                if arena.failure or time.monotonic() > deadline:
                    raise AssertionError(f"a post that nobody has touched was not taken: {arena.failure}")
            if len(near.recv(nbytes, socket.MSG_WAITALL)) != nbytes:
                raise AssertionError("a post that nobody has touched was not answered")
            target.outcomes["computed"] += 1
        near.sendall(mutated[spared[-1] if spared else 0 :])
        near.shutdown(socket.SHUT_WR)
        while not arena.failure:
            target.outcomes["computed"] += target.step(PATIENCE_US)
            if time.monotonic() > deadline:
                raise AssertionError("the stream neither ended nor failed")
        target.outcomes["computed"] += target.step()
        target.faults()
        mirror.close()
        near.close()
        target.receiver.remove_link(target.key)


def run(over: str, count: int, seed: int) -> tuple[Target, str]:
    """``count`` strikes; raises AssertionError for whatever must not happen."""
    target = Target()
    attacker = SharedMemory(target) if over == "shm" else Stream(target)
    before = Held.now()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        if number == CHECK_EVERY * 10:
            before = Held.now()
        try:
            attacker.strike(rng)
            if number % CHECK_EVERY == 0:
                target.check_other()
                target.faults()
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}, over {over}: {error}") from error
    target.check_other()
    after = Held.now()
    if after.leaks(before):
        raise AssertionError(after.growth(before))
    return target, after.growth(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--over", choices=("shm", "tcp"), default="shm")
    args = parser.parse_args()
    started = time.monotonic()
    target, growth = run(args.over, args.count, args.seed)
    seconds = time.monotonic() - started
    print(f"{args.count} mutated windows over {args.over} in {seconds:.0f} s, seed {args.seed}: {growth}")
    for outcome, times in target.outcomes.most_common():
        print(f"  {times:8d}  {outcome}")
    target.close()


if __name__ == "__main__":
    main()
