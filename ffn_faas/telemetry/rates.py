"""From totals that F counts to what happens now; page/rates.js does the same in the browser. Pure."""

from __future__ import annotations

from typing import Any

WINDOW_S = 3.5


class Rates:
    """Of one F rank; forgets all when F was started again. F's own clock, the sum of its phases, is the time."""

    def __init__(self) -> None:
        self._samples: list[dict[str, float]] = []

    def add(self, status: dict[str, Any]) -> None:
        """A body of /status; one of a rank that does not answer, or counts no steps yet, is passed over."""
        steps = status.get("steps")
        if not steps or "steps" not in steps:
            return
        sample = {"at": sum(status["phase_seconds"].values()), "send_s": steps.get("post_s", 0.0), **steps}
        sample |= {f"{part}_s": seconds["total"] for part, seconds in status.get("step_seconds", {}).items()}
        if self._samples and (sample["at"] <= self._samples[-1]["at"] or steps["steps"] < self._samples[-1]["steps"]):
            self._samples.clear()
        self._samples = [kept for kept in self._samples if sample["at"] - kept["at"] <= WINDOW_S][-100:]
        self._samples.append(sample)

    def now(self) -> dict[str, float] | None:
        """Over the last seconds: steps_per_s, rows_per_s, busy (0 ... 1), and wait_s, compute_s, send_s of a step."""
        if len(self._samples) < 2:
            return None
        first, last = self._samples[0], self._samples[-1]
        elapsed = last["at"] - first["at"]
        gone = {key: last.get(key, 0.0) - first.get(key, 0.0) for key in last}
        rates = {"steps_per_s": gone["steps"] / elapsed, "rows_per_s": gone["rows"] / elapsed}
        rates["busy"] = min(1.0, (gone.get("compute_s", 0.0) + gone["send_s"]) / elapsed)
        if gone["steps"]:
            rates |= {key: gone[key] / gone["steps"] for key in ("wait_s", "compute_s", "send_s") if key in gone}
            rates["rows_per_step"] = gone["rows"] / gone["steps"]
        return rates
