"""Which experts the tokens of a bench ask for: uniform, skewed as Zipf's law, or recorded from a model."""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ffn_faas.errors import UsageError

Draw = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Expert ids [tokens, top_k], no expert twice in a row, and weights [tokens, top_k] that sum to 1 in a row."""

FORMS = "uniform, zipf, zipf:EXPONENT or recorded:FILE.npz"


class Router:
    """Draws batches; the same seed gives the same batch. ``form`` is one of FORMS. Raises UsageError."""

    def __init__(self, form: str, experts: int, top_k: int) -> None:
        name, _, argument = form.partition(":")
        self.experts, self.top_k = experts, top_k
        self._recorded: NDArray[np.int32] | None = None
        self._logits = np.zeros(experts)
        if name == "zipf":
            self._logits = -_exponent(argument) * np.log(np.arange(1, experts + 1))
        elif name == "recorded":
            self._recorded = read_recorded(Path(argument), experts, top_k)
        elif form != "uniform":
            raise UsageError(f"--routing {form} is not known", remedy=f"one of {FORMS}")

    def draw(self, tokens: int, seed: int) -> Draw:
        """Recorded tokens are taken as they followed each other, from a random place, as often as needed."""
        random = np.random.default_rng(seed)
        scores = random.random((tokens, self.top_k), np.float32) + np.float32(0.1)
        weights = scores / scores.sum(1, keepdims=True)
        if self._recorded is not None:
            begin = int(random.integers(len(self._recorded)))
            return self._recorded[(begin + np.arange(tokens)) % len(self._recorded)], weights
        # The top k of logits plus Gumbel noise: draws without replacement, each by its share of what is left.
        keys = self._logits + random.gumbel(size=(tokens, self.experts))
        ids = np.argpartition(-keys, self.top_k - 1, axis=1)[:, : self.top_k]
        return np.ascontiguousarray(ids, np.int32), weights


def read_recorded(path: Path, experts: int, top_k: int) -> NDArray[np.int32]:
    """``ids`` [n, top_k] of an .npz file: expert ids of n tokens of one layer, in the order in which they came."""
    try:
        with np.load(path, allow_pickle=False) as content:
            ids = content["ids"]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise UsageError(f"--routing recorded: cannot read ids from {path}: {error}") from error
    if ids.ndim != 2 or ids.shape[1] != top_k or not len(ids) or ids.dtype.kind != "i":
        raise UsageError(f"{path} holds ids {ids.dtype} {list(ids.shape)}, [n, {top_k}] integers are needed")
    if ids.min() < -1 or ids.max() >= experts:
        raise UsageError(f"{path} names expert {ids.max()}, this layer has {experts}", remedy="give --experts")
    return np.ascontiguousarray(ids, np.int32)


def _exponent(text: str) -> float:
    try:
        return float(text or "1")
    except ValueError:
        raise UsageError(f"--routing zipf:{text} names no number", remedy="zipf:1.0, for example") from None
