"""Mutated messages on the attach and world sockets of a real management port; another session must stay.

    python -m tests.fuzz.messages --count 100000 --seed 0

Each connection says up to four messages, right ones at first so that later states are reached, then mutated ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

from tests.fuzz.frame_peer import FramePeer
from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.report import Held
from tests.http.conftest import Service, attach_message, receive

CORPUS = Path(__file__).parent / "corpus" / "messages"
CHECK_EVERY = 200
ANSWER_S = 10.0
SILENCE_S = 0.002


def corpus() -> dict[str, str]:
    """Messages by name; those named crash-* once found something."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(CORPUS.glob("*.json"))}


class Target:
    """A management port with one good session on it."""

    def __init__(self) -> None:
        self.service = Service()
        self.service.to_ready()
        self.seeds = corpus()
        self.outcomes: Counter[str] = Counter()
        self._stack = ExitStack()
        self.good = self._stack.enter_context(self.service.socket())
        self.good.send(attach_message(instance="good"))
        receive(self.good, "granted")
        receive(self.good, "windows")
        self.good.send('{"type": "windows_mapped"}')
        receive(self.good, "attached")

    def script(self, rng: random.Random, number: int) -> list[str | bytes]:
        attach = attach_message(instance=f"hostile-{number}")
        lead: list[str | bytes] = rng.choice(([], [attach], [attach, self.seeds["windows_mapped"]]))
        said = list(lead)
        for _ in range(rng.randint(1, 2)):
            seed = attach if rng.random() < 0.3 else rng.choice(list(self.seeds.values()))
            mutated = mutate_json(seed, rng) if rng.random() < 0.7 else None
            if mutated is None:
                data = mutate_bytes(seed.encode(), rng)
                said.append(data if rng.random() < 0.3 else data.decode("utf-8", errors="replace"))
            else:
                said.append(mutated)
        return said

    def strike(self, rng: random.Random, number: int) -> None:
        path = "/v1/world" if rng.random() < 0.1 else "/v1/attach"
        with closing(FramePeer(self.service.port, path)) as peer:
            for message in self.script(rng, number):
                if not peer.send(message):
                    break
            # What is said at once; silence means that F waits for more, which is an answer too.
            while (heard := peer.hear(SILENCE_S)) is not None:
                self.outcomes[heard] += 1

    def check(self) -> None:
        """The good session lives, F is ready and no stranger's session is left."""
        if self.service.get("/ready").status_code != 200:
            raise AssertionError(f"F is no longer ready: {self.service.get('/live').json()}")
        self.good.send('{"type": "layers", "names": ["model.layers.1.mlp.experts"]}')
        if receive(self.good, "layers_accepted")["indices"] != [1]:
            raise AssertionError("the good session is answered wrongly")
        deadline = time.monotonic() + ANSWER_S
        while len(left := self.service.state.sessions.snapshot()) > 1:
            if time.monotonic() > deadline:
                raise AssertionError(f"sessions of peers that are gone: {[session.instance for session in left]}")
            time.sleep(0.01)
        self.service.connector.opened.clear()  # what the stand-in remembers is no leak of F

    def close(self) -> None:
        self._stack.close()
        self.service.server.shutdown()


def run(count: int, seed: int) -> tuple[Target, str]:
    """``count`` connections; raises AssertionError for whatever must not happen."""
    target = Target()
    before = Held.now()
    for number in range(count):
        if number == CHECK_EVERY:
            before = Held.now()
        try:
            target.strike(random.Random(f"{seed} {number}"), number)
            if number % CHECK_EVERY == CHECK_EVERY - 1:
                target.check()
        except (AssertionError, OSError, TimeoutError) as error:
            raise AssertionError(f"seed {seed}, number {number}: {error}") from error
    target.check()
    after = Held.now()
    # The event loop's own threads for what may block come one by one, and are no more than this.
    if after.leaks(before, spare_threads=(os.cpu_count() or 1) + 4):
        raise AssertionError(after.growth(before))
    return target, after.growth(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # each refusal is one
    started = time.monotonic()
    target, growth = run(args.count, args.seed)
    print(f"{args.count} mutated connections in {time.monotonic() - started:.0f} s, seed {args.seed}: {growth}")
    for outcome, times in target.outcomes.most_common(30):
        print(f"  {times:8d}  {outcome}")
    target.close()


if __name__ == "__main__":
    main()
