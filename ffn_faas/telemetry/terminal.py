"""Draws a node's F ranks as lines of a terminal. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ffn_faas.units import format_size

SHADES = " ░▒▓█"
COLORS = {"ready": 32, "failed": 31, "unreachable": 31}
BUSY_COLOR = 33
COLUMNS = ["rank", "phase", "steps/s", "rows/s", "busy", "compute", "wait", "send", "weights", "windows", "process"]


@dataclass(frozen=True)
class Look:
    """``ranks`` as /node has them, ``rates`` (telemetry.rates) by rank, ``problem`` when the last look failed."""

    ranks: list[dict[str, Any]]
    rates: dict[int, dict[str, float] | None]
    problem: str = ""


def draw(look: Look, width: int, height: int, *, color: bool) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters (colour codes not counted)."""
    here = next((rank for rank in look.ranks if "phase" in rank), None)
    lines = [_clip(f"ffn_faas  {here['model'] if here else ''}", width)]
    if look.problem:
        lines.append(_paint(_clip(f"{look.problem}; waiting for it", width), 31, color=color))
    if here is None:
        return lines[:height]
    lines += [_paint(_clip(text, width), 31, color=color) for text in _reasons(look.ranks)]
    lines += ["", _clip(_phases(here), width), ""]
    lines += _ranks(look, width, color=color)
    lines += ["", *(_clip(text, width) for text in _sessions(here["sessions"]))]
    lines += ["", *_experts(look.ranks, width, height - len(lines) - 2)]
    return lines[:height]


def _reasons(ranks: list[dict[str, Any]]) -> list[str]:
    told = [(rank["rank"], rank.get("reason") or rank.get("unreachable")) for rank in ranks]
    return [f"F rank {number}: {reason}" for number, reason in told if reason]


def _phases(here: dict[str, Any]) -> str:
    spent = "  ".join(f"{name} {seconds:.1f} s" for name, seconds in here["phase_seconds"].items())
    return spent + (f"  {here['progress']:.0%}" if here["phase"] == "loading" else "")


def _ranks(look: Look, width: int, *, color: bool) -> list[str]:
    lines = [_clip(_columns(COLUMNS), width)]
    for rank in look.ranks:
        rates = look.rates.get(rank["rank"]) or {}
        phase = rank.get("phase", "unreachable")
        cells = [
            str(rank["rank"]),
            phase,
            _count(rates.get("steps_per_s")),
            _count(rates.get("rows_per_s")),
            _percent(rates.get("busy")),
            *(_seconds(rates.get(f"{part}_s")) for part in ("compute", "wait", "send")),
            _size(rank.get("weights_bytes")),
            _size(rank.get("window_bytes")),
            _size(rank.get("memory", {}).get("rss_bytes")),
        ]
        lines.append(_paint(_clip(_columns(cells), width), COLORS.get(phase, BUSY_COLOR), color=color))
    return lines


def _columns(cells: list[str]) -> str:
    return " ".join([f"{cells[0]:>4} {cells[1]:<11}", *(f"{cell:>8}" for cell in cells[2:])])


def _sessions(sessions: list[dict[str, Any]]) -> list[str]:
    if not sessions:
        return ["sessions: no Attention is attached"]
    lines = ["session      A ranks  capacity  peer"]
    for one in sessions:
        attached = f"{len(one['attention_ranks'])} of {one['num_attention_ranks']}"
        peers = ", ".join(sorted(set(one["attention_ranks"].values())))
        lines.append(f"{one['instance'][:12]:<12} {attached:>7}  {one['capacity']:>8}  {peers}")
    return lines


def _experts(ranks: list[dict[str, Any]], width: int, room: int) -> list[str]:
    """A line a layer, experts of all ranks side by side; several experts a character where the width asks for it."""
    tables = [rank.get("expert_rows") for rank in ranks]
    if not any(tables):
        return ["tokens per expert: not counted" if all(table is None for table in tables) else "no tokens yet"]
    layers = max(len(table or []) for table in tables)
    joined = [[count for table in tables if table for count in table[layer]] for layer in range(layers)]
    hottest = max(max(row) for row in joined)
    if not hottest:
        return ["no tokens yet"]
    skews = [max(row) * len(row) / sum(row) for row in joined if any(row)]
    head = f"tokens per expert, up to {_count(hottest)}; layers' max over mean {max(skews):.2f} at most"
    group = -(-len(joined[0]) // max(1, width - 5))
    lines = [_clip(head, width)]
    for number, row in enumerate(joined[: max(0, room - 1)]):
        cells = [max(row[first : first + group]) for first in range(0, len(row), group)]
        shade = [SHADES[min(len(SHADES) - 1, int((cell / hottest) ** 0.5 * (len(SHADES) - 1) + 0.5))] for cell in cells]
        lines.append(f"{number:>4} {''.join(shade)}")
    return lines


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def _size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def _clip(text: str, width: int) -> str:
    return text[:width]


def _paint(text: str, number: int, *, color: bool) -> str:
    return f"\x1b[{number}m{text}\x1b[0m" if color else text
