// From totals that F counts to what happens now. F's own clock (the sum of its phases) is the time axis.
const KEPT_S = 120;

export const uptime = (status) => Object.values(status.phase_seconds).reduce((sum, value) => sum + value, 0);

// Of one F rank: keeps what it is given, forgets all when F was started again.
export class Rates {
  constructor() {
    this.samples = [];
  }

  add(status) {
    if (!status.steps || status.steps.steps === undefined) return;
    const sample = { at: uptime(status), ...status.steps, send_s: status.steps.post_s };
    for (const [part, { total }] of Object.entries(status.step_seconds ?? {})) sample[`${part}_s`] = total;
    const last = this.samples.at(-1);
    if (last && (sample.at < last.at || sample.steps < last.steps)) this.samples = [];
    if (last && this.samples.length && sample.at - last.at < 0.2) return;
    this.samples.push(sample);
    while (this.samples.length > 2 && sample.at - this.samples[0].at > KEPT_S) this.samples.shift();
  }

  // Over about the last three seconds; null until there are two samples.
  now() {
    const to = this.samples.at(-1);
    if (this.samples.length < 2) return null;
    let from = this.samples.at(-2);
    for (const sample of this.samples) {
      if (to.at - sample.at <= 3.5) {
        if (sample !== to) from = sample;
        break;
      }
    }
    return between(from, to);
  }

  history() {
    const points = [];
    for (let index = 1; index < this.samples.length; ++index) {
      points.push([this.samples[index].at, between(this.samples[index - 1], this.samples[index]).rows_per_s]);
    }
    return points;
  }
}

function between(from, to) {
  const elapsed = to.at - from.at;
  const steps = to.steps - from.steps;
  const each = (key) => (steps > 0 ? (to[key] - from[key]) / steps : null);
  return {
    steps_per_s: steps / elapsed,
    rows_per_s: (to.rows - from.rows) / elapsed,
    rows_per_step: each("rows"),
    posts_per_step: each("posts"),
    wait_s: each("wait_s"),
    compute_s: each("compute_s"),
    send_s: each("send_s"),
    busy: Math.min(1, (to.compute_s - from.compute_s + to.send_s - from.send_s) / elapsed),
  };
}
