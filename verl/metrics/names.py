"""The one table of metrics: what each is called, its unit, what it means and how to read it.

``docs/metrics.md`` is printed from it: ``python -m verl.metrics.names > docs/metrics.md``.
A name with a ``<part>`` is a family: users name its members (their reward functions, say).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


class UndocumentedMetric(UserWarning):
    """A recorded name is missing from this table; the project's tests make it an error."""


@dataclass(frozen=True)
class Metric:
    """``reading``: what a good or a bad value looks like, and what it points to."""

    name: str
    unit: str
    meaning: str
    reading: str

    @property
    def family(self) -> re.Match | None:
        """The ``<part>`` of a family's name."""
        return re.search(r"<\w+>", self.name)


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("reward/mean", "reward", "mean total reward of the lap's rows that have one", "should rise; the goal"),
        Metric("reward/std", "reward", "standard deviation of those totals", "near 0: nothing to learn from"),
        Metric("reward/flat_groups", "share", "groups whose rows all got the same total", "near 1: change the prompts"),
        Metric("reward/<name>", "reward", "mean of one reward, unweighted, over rows it judged", "which part moves"),
        Metric("reward/<name>/count", "rows", "rows that this reward judged", "lower than the rows: it abstained"),
        Metric("reward/abstained", "rows", "rows that no reward judged; no part of any mean", "normally 0"),
        Metric("reward/dropped", "rows", "rows left out because a reward failed", "above 0: repair the reward"),
        Metric("reward/failed", "calls", "reward calls that raised or gave no number", "above 0: repair the reward"),
        Metric("reward/timed_out", "calls", "reward calls stopped at reward_timeout", "above 0: a grader hangs"),
        Metric("reward/truncated", "rows", "rows cut to the reward model's own limit", "high: its limit is too short"),
        Metric("reward/overlong_penalty", "reward", "mean penalty for the last part of the limit", "to 0: shorter"),
        Metric("reward/greedy_mean", "reward", "mean reward of the prompts' greedy answers (remax)", "the baseline"),
        Metric("extra/<key>", "any", "mean of a number that rewards returned beside the score", "as its author says"),
        Metric("extra/<key>/count", "rows", "rows that carried this number", "sparse keys have fewer than all rows"),
        Metric("kl/mean", "nats/token", "KL of policy to starting policy, by kl_estimator", "rises slowly; jumps: lr"),
        Metric("kl/per_response", "nats", "the same KL summed over a response", "what kl_target aims at"),
        Metric("kl/coef", "1", "KL coefficient in use", "constant unless kl_target is set"),
        Metric("policy/loss", "loss", "policy loss, mean over the lap's optimizer steps", "its level means little"),
        Metric("policy/entropy", "nats/token", "entropy of the policy on sampled tokens", "to 0: collapse, lower lr"),
        Metric("policy/clip_fraction", "share", "tokens whose ratio is clipped", "0.05 to 0.3 with reuse; higher: lr"),
        Metric("policy/grad_norm", "norm", "gradient norm before clipping, mean over optimizer steps", "spikes: look"),
        Metric("policy/ratio_max", "1", "largest ratio of new to old probability", "exactly 1 in a lap's first step"),
        Metric(
            "policy/kl_step", "nats/token", "KL of the old to the new policy inside the lap", "above 0.05: lower lr"
        ),
        Metric("policy/lr", "1", "learning rate of the last optimizer step", "follows the schedule"),
        Metric(
            "policy/rows_trained", "rows", "rows computed in the update; the others' loss is exactly 0", "few: flat"
        ),
        Metric("policy/optimizer_steps", "steps", "optimizer steps of the lap", "mini-batches times update_epochs"),
        Metric("policy/empty_steps", "steps", "optimizer steps skipped because no row had a loss", "normally 0"),
        Metric("critic/bad_steps", "steps", "critic steps skipped for a gradient that is not finite", "normally 0"),
        Metric("policy/bad_steps", "steps", "optimizer steps skipped for a gradient that is not finite", "normally 0"),
        Metric("preference/accuracy", "share", "pairs (or labels) that the model gets right", "0.5 is chance; rises"),
        Metric("preference/margin", "reward", "implicit reward of the better minus the worse answer", "rises from 0"),
        Metric("preference/chosen_reward", "reward", "implicit reward (or score) of chosen answers", "falls: high lr"),
        Metric("preference/rejected_reward", "reward", "implicit reward (or score) of rejected answers", "falls"),
        Metric("preference/desirable_reward", "reward", "kto: implicit reward of good answers", "rises"),
        Metric("preference/undesirable_reward", "reward", "kto: implicit reward of bad answers", "falls"),
        Metric("preference/kl_baseline", "nats", "kto: KL estimate from mismatched answers, largest of the lap", "low"),
        Metric(
            "preference/one_prompt",
            "laps",
            "kto: 1 in a lap whose rows all have one prompt: baseline 0",
            "often: larger laps",
        ),
        Metric("preference/pairs", "pairs", "online_dpo: prompts whose answers differ in reward", "few: flat rewards"),
        Metric("sft/nll", "nats/token", "negative log-likelihood of the trained tokens", "falls; see eval/loss too"),
        Metric("distill/kl", "nats/token", "KL of the student to the teacher on the student's tokens", "falls"),
        Metric("process_reward/loss", "loss", "cross-entropy of the implicit reward with the outcome", "below 0.69"),
        Metric("process_reward/accuracy", "share", "rows whose outcome the implicit reward tells", "rises from 0.5"),
        Metric("process_reward/grad_norm", "norm", "its gradient norm before clipping", "spikes: look"),
        Metric(
            "process_reward/bad_steps", "steps", "its steps skipped for a gradient that is not finite", "normally 0"
        ),
        Metric("rollout/kl", "nats/token", "KL of the sampler to the trainer on the trained tokens", "fp32: about 0"),
        Metric(
            "rollout/effective_share", "share", "effective sample size of trainer / sampler", "near 1; see correction"
        ),
        Metric("publish/bytes", "bytes", "weights that went from worker to worker, all together", "0: used in place"),
        Metric("publish/changed", "share", "values that changed, of those compared with the last publish", "small: lr"),
        Metric("columns/bytes", "bytes", "rows' columns that went from worker to worker", "0 where devices are shared"),
        Metric("rollout/staleness", "laps", "mean age of the weights that sampled the rows", "at most max_staleness"),
        Metric("correction/weight_mean", "1", "mean importance weight of sampler against trainer", "near 1"),
        Metric("correction/effective_share", "share", "effective sample size / tokens", "low: too far off policy"),
        Metric("correction/changed", "share", "tokens whose weight was capped or set to 0", "high: look at the gap"),
        Metric(
            "rollout/refills", "rollouts", "dynamic_sampling: rollouts beyond the lap's own", "many: prompts say little"
        ),
        Metric("rollout/groups_sampled", "groups", "dynamic_sampling: groups sampled for this lap", "price of a lap"),
        Metric("critic/loss", "loss", "value loss, mean over the lap's optimizer steps", "should fall, then stay"),
        Metric("critic/grad_norm", "norm", "critic gradient norm before clipping", "spikes: look at returns"),
        Metric(
            "critic/explained_variance", "share", "1 - var(return - value) / var(return)", "towards 1; below 0: bad"
        ),
        Metric(
            "critic/clip_fraction", "share", "values clipped by value_clip", "high: returns move faster than values"
        ),
        Metric("critic/value_mean", "reward", "mean value over response tokens", "near the mean return"),
        Metric("critic/lr", "1", "critic learning rate of the last optimizer step", "follows the schedule"),
        Metric(
            "rollout/logprob_diff_mean",
            "nats",
            "mean |trainer - sampler| log-probability",
            "fp32 1e-6, bf16 0.03; with old_logprobs sampler the lap's own updates are in it",
        ),
        Metric("rollout/logprob_diff_max", "nats", "largest |trainer - sampler| log-probability", "fp32: below 1e-4"),
        Metric("response/length_mean", "tokens", "mean response length, end token included", "drifts: reward hacking?"),
        Metric("response/length_max", "tokens", "longest response", "at the limit: see response/truncated"),
        Metric(
            "response/sampled_mean", "tokens", "of these the policy's own, where there is an environment", "its share"
        ),
        Metric("response/turns_mean", "messages", "mean messages of the policy in an episode", "at max_turns: cut"),
        Metric("response/truncated", "share", "responses cut at max_response_length", "high: raise the limit"),
        Metric("data/epoch", "epochs", "passes over the prompts so far", "fractional"),
        Metric("data/filtered", "prompts", "prompts left out as too long, in all", "high: raise max_prompt_length"),
        Metric("data/bad", "rows", "rows that could not be read and were left out (bad_rows: drop)", "look at the log"),
        Metric("data/truncated", "prompts", "prompts cut to max_prompt_length, in all", "high: raise it"),
        Metric("eval/reward_mean", "reward", "mean reward of greedy answers on held-out prompts", "the honest curve"),
        Metric(
            "eval/accuracy",
            "share",
            "held-out answers with a reward of at least 1; of pairs and labels: right ones",
            "0/1",
        ),
        Metric("eval/length_mean", "tokens", "mean length of held-out answers", "beside response/length_mean"),
        Metric("eval/truncated", "share", "held-out answers cut at max_response_length", "part of a low score?"),
        Metric("eval/rows", "rows", "held-out prompts answered", "small sets are noisy"),
        Metric(
            "eval/loss", "loss", "the loss of held-out rows (pairs, labels, chats)", "rises while training: overfit"
        ),
        Metric("eval/margin", "reward", "preference/margin of held-out pairs", "should rise"),
        Metric("eval/nll", "nats/token", "sft/nll of held-out chats", "should fall"),
        Metric(
            "eval/<name>", "reward", "mean of one reward on held-out prompts, or of a loss's number", "which part moves"
        ),
        Metric("time/step", "s", "wall time of the lap", "the price of a step"),
        Metric("time/generate", "s", "wall time sampling responses", "usually the largest share"),
        Metric("time/reward", "s", "wall time waiting for rewards", "large: slow grader, or batch it"),
        Metric("time/update", "s", "wall time in policy and critic updates", "beside time/generate"),
        Metric("time/publish", "s", "wall time moving weights to the rollout", "0 when shared in place"),
        Metric("time/<stage>", "s", "wall time of another stage (logprobs, values, eval, ...)", "share it"),
        Metric("throughput/tokens_per_second", "tokens/s", "prompt and response tokens of the lap per second", "speed"),
        Metric("generate/latency_p50", "s", "median time from request to finished row", "typical"),
        Metric("generate/latency_p95", "s", "95th percentile of it", "the tail that a lap waits for"),
        Metric("generate/latency_p99", "s", "99th percentile of it", "metrics.alarms can watch it"),
        Metric(
            "memory/peak_gib", "GiB", "GPU: peak allocated in the lap; CPU: peak of the process", "beside the limit"
        ),
        Metric("memory/rss_gib", "GiB", "host memory held by the process (Linux)", "grows lap by lap: a leak"),
        Metric("memory/reserved_gib", "GiB", "GPU memory held by the allocator", "what nvidia-smi shows"),
        Metric(
            "memory/fragmentation", "share", "reserved GPU memory in split blocks nobody uses", "above 0.2: fragmented"
        ),
        Metric(
            "memory/alloc_retries",
            "retries",
            "allocations that first had to empty the cache, in all",
            "rising: too full",
        ),
        Metric("gpu/utilisation", "share", "time with a kernel running, mean over the lap; needs NVML", "low: starved"),
        Metric("not_finite", "values", "values of this line left out because they were NaN or infinite", "normally 0"),
        Metric("alarms", "metrics", "metrics beyond a limit of metrics.alarms or alarms_below", "normally absent"),
        Metric("health/warnings", "warnings", "conditions told as a warning that still hold", "above 0: see the log"),
    )
}

# families with a longer fixed part first: "reward/f/count" is the count of f, not the mean of "f/count"
_FAMILIES = [
    (re.compile(re.sub(r"<\w+>", "(.+)", re.escape(m.name)), re.DOTALL), m)
    for m in sorted((m for m in METRICS.values() if m.family), key=lambda m: -len(m.name))
]


def find(name: str) -> tuple[Metric, str | None] | None:
    """The table's entry for a recorded name, and the member's own part if that entry is a family."""
    if name in METRICS:
        return METRICS[name], None
    for pattern, metric in _FAMILIES:
        if match := pattern.fullmatch(name):
            return metric, match[1]
    return None


def member(family: str, part: str) -> str:
    """The full name of a family's member: ``member("reward/<name>", "brevity")`` is ``reward/brevity``.

    A part that would give a name the table uses otherwise gets an underscore: a reward called ``mean`` is
    ``reward/mean_``.
    """
    match = METRICS[family].family
    if match is None:
        raise ValueError(f"{family} is no family")
    while (found := find(name := family.replace(match[0], part))) is None or found != (METRICS[family], part):
        part += "_"
    return name


def nearest(name: str) -> str:
    """The documented name that looks most like ``name``."""
    return difflib.get_close_matches(name, METRICS, n=1, cutoff=0)[0]


def document() -> str:
    """The text of ``docs/metrics.md``."""
    lines = ["# Metrics", "", *_INTRODUCTION, "", "| name | unit | meaning | how to read it |", "|---|---|---|---|"]
    for m in METRICS.values():
        cells = (f"`{m.name}`", m.unit, m.meaning, m.reading)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
Printed from the table in `verl/metrics/names.py` by `python -m verl.metrics.names > docs/metrics.md`; a test keeps the
two equal. Every sink shows the same names.

- `metrics.jsonl`: one object per step (one lap), `{"step": 3, "reward/mean": 0.65, ...}`, written when the step ends.
  Some names are on every line (`ALWAYS` in `verl/metrics/sinks.py`), null where the step has no such value; any other
  is absent then. NaN and infinities are never written: `not_finite` counts them. A mean is
  over the rows that have a value; `<name>/count` beside it says how many.
  After a resume at step k the lines of later steps are cut off.
- `samples.jsonl`: four rows of each step, evenly spaced, one object each: `step`, `row_id` (prompt, draw and answer:
  `269@0/3`), `prompt`, `response`, `response_ids`, `finish_reason`, `version` of the policy, `reward`, `rewards` by
  part; `group_rewards`, those of all answers to the prompt, where there are several; `logprobs`, the sampler's, as
  mean, smallest and sum; `token_logprobs`, one for each id, to four decimals. Of an episode also `response_mask`,
  1 for each id that the policy sampled; for others `token_logprobs` has null. Like `metrics.jsonl`, it is whole up to
  its last line at every moment and can be read while the run goes on.
- `verl view RUN`: a page that shows those rows token by token, see [below](#looking-at-a-run).
- The terminal: a table of the last steps, or one line per step where the output is no terminal.
- `tensorboard/`: the same names as scalars, samples as text. `metrics: {tensorboard: false}` turns it off.
- Prometheus: `metrics: {prometheus_port: 9400}` serves `http://127.0.0.1:9400/metrics`, on this machine only, so a
  scraper elsewhere needs an agent or a tunnel. `/` becomes `_` behind `verl_`: `verl_reward_mean`. Members of a family
  are one metric with a label, whatever users call them: `verl_reward{name="my reward!"}`. A gauge keeps its last value;
  `verl_step` says how far the run is. The port is bound before models load: one that is taken stops the run at once.
- Prometheus and Grafana, ready to use, in `examples/monitoring`: `prometheus.yml` (run `prometheus
  --config.file=examples/monitoring/prometheus.yml --web.listen-address=127.0.0.1:9090`), `alerts.yml` (a run that is
  gone or stalls, slow generation, an idle GPU, values that aren't finite, flat rewards) and `grafana-dashboard.json`
  (Dashboards, New, Import). A run is a target of `prometheus.yml`, with a label `run` that the dashboard chooses by.
- Alarms: `metrics: {alarms: {generate/latency_p99: 30}}` logs a warning in each step above the limit and counts them;
  `alarms_below: {gpu/utilisation: 0.3}` in each step below. One on `time/step` also warns while the step still lasts.
- Health: what points to a run that goes wrong is told once, on the console and in `logs/controller.log`, with the keys
  to turn, and again only after it was gone for a while: optimizer steps skipped for NaN, a reward that falls far from
  its best, KL to the start or within a step far above the usual, entropy near 0, groups that are all flat, responses
  that are all cut, sampler and trainer further apart than rounding explains. `health/warnings` counts what holds. The
  limits are constants of `verl/metrics/health.py`.
- `metrics: {max_bad_steps: 5}`: after so many skipped optimizer steps in a row the run stops (exit status 1). The
  step's rows are then in `bad_rows.jsonl`; checkpoints stay as they were.

## Looking at a run

`verl view runs/default` serves a page at `http://127.0.0.1:7070/`, also while the run goes on, until Ctrl-C ends it
with status 0. It reads the run folder and changes nothing there, starts in a second, and loads no model, only the
tokenizer.

- Each token is coloured by the probability it was sampled with; what a tool or an environment wrote is hatched. A click
  tells a token's id, text and numbers, and buttons lead to the least likely ones.
- The list sorts by reward, length or likelihood, and filters by step, finish reason and text in prompt or response.
  "Rows of this prompt in all steps" follows one prompt through the run. `j` and `k` go from row to row.
- The curves mark the chosen row's step and show held-out values as dots; a click on one lists that step's rows. Runs on
  pairs, labels or chats sample nothing and have curves only.
- `--port 0` takes any free port. On another machine: `ssh -L 7070:127.0.0.1:7070 that-machine`. `--host 0.0.0.0` lets
  others in, without a password; names other than the machine's own are refused, so open it by address.
- Lines that can't be read are named and left out. Runs of earlier versions have no `token_logprobs`, so no colours.

## The table

Means over a lap: `policy/*` and `critic/*` are means over its optimizer steps unless the table says otherwise. "In all"
means since the run began.""".splitlines()


if __name__ == "__main__":
    print(document(), end="")
