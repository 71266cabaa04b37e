"""``bench --plot``: round trip, local kernel, rivals and floor over tokens, as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ffn_faas.errors import ResourceError


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG. Raises ResourceError without matplotlib or when the file cannot be written."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ResourceError("--plot needs matplotlib", remedy="pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines(result).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label, linestyle="--" if label == "floor" else "-")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ResourceError(f"--plot: cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def lines(result: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, microseconds) points of each curve, by its name."""
    curves: dict[str, list[tuple[int, float]]] = {}
    several = len({row.get("sessions", 1) for row in result["rows"]}) > 1
    for row in result["rows"]:
        suffix = f", {row['sessions']} sessions" if several else ""
        values = {"round trip": row.get("round_trip_us"), "kernel alone": row.get("local_us")}
        values |= {"floor": row.get("floor_us"), **row.get("rivals_us", {})}
        for name, value in values.items():
            if value is not None:
                curves.setdefault(name + (suffix if name == "round trip" else ""), []).append((row["tokens"], value))
    return curves
