"""Mutations of bytes and of JSON, by a seeded generator: a failure is repeated by its seed and number."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS = (
    -1,
    0,
    1,
    2,
    7,
    255,
    4096,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**40,
)
ODD: tuple[Any, ...] = (None, True, [], {}, "", "x", 0.5, -0.0, 1e308, float("inf"), float("nan"), "\0", "\ud83d\ude00")
MOST_CHARACTERS = 3 << 20
"""Of JSON: well above the largest frame that F takes, and no more than the generator can afford."""
WORDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, 0x7FC00000, 0x7F800000, 0xFF800000)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to eight changes: flips, cuts, insertions, repetitions, words that are limits somewhere."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(6)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[place : place + rng.choice((1, 2, 4, 64, 1024))]
        elif kind == 2:
            changed[place:place] = rng.randbytes(rng.choice((1, 2, 4, 64)))
        elif kind == 3:
            changed[place:place] = changed[place : place + rng.choice((1, 8, 128))]
        elif kind == 4:
            changed[place : place + 4] = rng.choice(WORDS).to_bytes(4, "little")
        else:
            del changed[place:]
    return bytes(changed)


def overwrite_words(data: bytearray | memoryview, rng: random.Random, count: int) -> None:
    """In place, sizes unchanged: aligned words become limits or noise."""
    for _ in range(count):
        place = rng.randrange(len(data) // 4) * 4
        word = rng.choice(WORDS) if rng.random() < 0.7 else rng.randrange(2**32)
        data[place : place + 4] = word.to_bytes(4, "little")


def mutate_json(text: str, rng: random.Random) -> str:
    """One to three changes of values, keys and nesting; the result is JSON, or nearly (NaN, Infinity)."""
    content = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        content = _mutated(content, rng)
    return json.dumps(content)


def _mutated(value: Any, rng: random.Random) -> Any:
    kind = rng.random()
    if isinstance(value, dict) and value and kind < 0.85:
        changed = dict(value)
        key = rng.choice(list(changed))
        if kind < 0.1:
            del changed[key]
        elif kind < 0.2:
            changed[rng.choice(("extra", key + "_", "", "__proto__"))] = changed[key]
        else:
            changed[key] = _mutated(changed[key], rng)
        return changed
    if isinstance(value, list) and value and kind < 0.7:
        place = rng.randrange(len(value))
        if kind < 0.2:
            return value * min(rng.choice((0, 2, 1000)), MOST_CHARACTERS // len(json.dumps(value)))
        return [*value[:place], _mutated(value[place], rng), *value[place + 1 :]]
    if isinstance(value, str) and kind < 0.5:
        return rng.choice((value * 2, value[:-1], value + "\0", value.upper(), "y" * rng.choice((129, 513, 70000))))
    if kind < 0.6:
        return rng.choice(NUMBERS)
    if kind < 0.9:
        return rng.choice(ODD)
    nested: Any = value
    for _ in range(rng.choice((3, 50, 250))):
        nested = [nested]
    return nested
