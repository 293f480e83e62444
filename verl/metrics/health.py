"""Signs in the metrics that a run goes wrong, each told once, with the key to turn."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping

WINDOW = 5  # steps whose mean reward is compared: a single step's is noise
FEW, MANY = 3, 5  # steps in a row with a sign before it is told: of jumps, and of what healthy runs show for a while
CLEAR = 5  # steps in a row without it before it may be told again

LOST = 0.5  # share of what the reward gained on its way to its best
SPREAD = 0.5  # and of the largest reward/std: a fall within what rows of one step differ by is no collapse
NOISE = 4.0  # and times the mean change from step to step: twice the range that averages of pure noise cover
KL = 5.0  # nats per token; healthy runs without a penalty stay at about 1, and 3 in single steps
KL_TIMES, KL_STEPS, KL_SMALL = 10.0, 20, 1.0  # times the median of the last steps, but not where KL is small anyway
KL_STEP = 0.2  # nats per token; 0.01 to 0.03 is usual, above 0.05 the ratios are clipped
ENTROPY = 0.01  # nats per token; runs that learned short certain answers stay at 0.02 and more
ENTROPY_SHARE = 0.005  # of the first steps': a model that began at 2 nats is then at ENTROPY
FLAT = 0.95  # share of groups; with 11 of 12 flat there is still something to learn from
TRUNCATED = 0.95  # share of responses; base models that can't stop yet begin at 0.9
GAP_FP32 = 1e-2  # nats; the native engine differs by 1e-4 at most, another one's kernels by a few 1e-3
GAP_BF16 = 1.0  # nats; single tokens of small probability differ by some tenths

Metrics = Mapping[str, float]


class Health:
    """Takes each step's metrics in order; says what is wrong with the run when it begins to be.

    ``gap``: the largest difference between trainer and sampler, in nats, that is rounding; None: not judged.
    """

    def __init__(self, gap: float | None = None) -> None:
        self._gap_limit = gap
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._best = self._first = -math.inf  # of the means over a window
        self._spread = 0.0
        self._changes, self._change_count = 0.0, 0
        self._kls: deque[float] = deque(maxlen=KL_STEPS)
        self._entropies: list[float] = []  # of the first steps
        rules: list[tuple[str, int, Callable[[float, Metrics], str]]] = [
            ("policy/bad_steps", 1, self._policy_skips),
            ("critic/bad_steps", 1, self._critic_skips),
            ("process_reward/bad_steps", 1, self._judge_skips),
            ("reward/mean", FEW, self._reward),
            ("kl/mean", FEW, self._kl),
            ("policy/kl_step", FEW, self._kl_step),
            ("rollout/logprob_diff_max", FEW, self._gap),
            ("policy/entropy", MANY, self._entropy),
            ("reward/abstained", FEW, self._abstained),
            ("reward/flat_groups", MANY, self._flat),
            ("response/truncated", MANY, self._truncated),
        ]
        self._conditions = [_Condition(name, patience, rule) for name, patience, rule in rules]

    def see(self, metrics: Mapping[str, float | None]) -> list[str]:
        """A sentence for each condition that begins with this step."""
        there = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        return [text for condition in self._conditions if (text := condition.see(there)) is not None]

    @property
    def conditions(self) -> int:
        """How many hold now: told, and not gone since."""
        return sum(condition.holds for condition in self._conditions)

    # -- rules: what is wrong in this step, or nothing -------------------------------------------------------------

    def _policy_skips(self, value: float, metrics: Metrics) -> str:
        return self._skips("actor", value)

    def _critic_skips(self, value: float, metrics: Metrics) -> str:
        return self._skips("critic", value)

    def _judge_skips(self, value: float, metrics: Metrics) -> str:
        return self._skips("process_reward", value)

    @staticmethod
    def _skips(role: str, value: float) -> str:
        if value == 0:
            return ""
        return (
            f"{value:g} of the {role}'s optimizer steps were skipped, the gradient was NaN or infinite: lower "
            f"{role}_model_config.optimizer.lr, set actor_model_config.dtype fp32, or look for rewards out of all "
            "proportion"
        )

    def _reward(self, value: float, metrics: Metrics) -> str:
        if self._rewards:
            self._changes += abs(value - self._rewards[-1])
            self._change_count += 1
        self._rewards.append(value)
        self._spread = max(self._spread, metrics.get("reward/std", 0.0))
        if len(self._rewards) < WINDOW:
            return ""
        now = statistics.fmean(self._rewards)
        if self._best == -math.inf:
            self._first = now
        self._best = max(self._best, now)
        least = (
            LOST * (self._best - self._first),
            SPREAD * self._spread,
            NOISE * self._changes / self._change_count,
        )
        if self._best - now <= max(least):
            return ""
        return (
            f"the reward has collapsed, over {WINDOW} steps it was {self._best:.3g} at best and is now {now:.3g}: go "
            "on from an earlier checkpoint with a lower actor_model_config.optimizer.lr or a higher init_kl_coef"
        )

    def _kl(self, value: float, metrics: Metrics) -> str:
        usual = statistics.median(self._kls) if len(self._kls) == KL_STEPS else math.inf
        self._kls.append(value)
        if value <= min(KL, max(KL_SMALL, KL_TIMES * usual)):
            return ""
        return (
            f"it is {value:.3g} nats per token, the policy has left its start behind: raise init_kl_coef, set "
            "kl_target, or lower actor_model_config.optimizer.lr"
        )

    def _kl_step(self, value: float, metrics: Metrics) -> str:
        if value <= KL_STEP:
            return ""
        return (
            f"within the step the policy moved by {value:.3g} nats per token: lower actor_model_config.optimizer.lr, "
            "algorithm.update_epochs or raise mini_batch_size"
        )

    def _gap(self, value: float, metrics: Metrics) -> str:
        if self._gap_limit is None or value <= self._gap_limit or metrics.get("rollout/staleness"):
            return ""
        return (
            f"trainer and sampler differ by up to {value:.3g} nats on a token, rounding explains {self._gap_limit:g}: "
            "set actor_model_config.dtype fp32 or rollout.engine native to find out, algorithm.correction to live with "
            "it"
        )

    def _entropy(self, value: float, metrics: Metrics) -> str:
        if len(self._entropies) < WINDOW:
            self._entropies.append(value)
        if value >= max(ENTROPY, ENTROPY_SHARE * statistics.fmean(self._entropies)):
            return ""
        return (
            f"it is {value:.3g} nats per token, the policy gives one answer only: if that isn't the right one, raise "
            "algorithm.entropy_coef or init_kl_coef, or lower actor_model_config.optimizer.lr"
        )

    def _flat(self, value: float, metrics: Metrics) -> str:
        if value < FLAT:
            return ""
        mean = f" at a mean reward of {metrics['reward/mean']:.3g}" if "reward/mean" in metrics else ""
        return (
            f"in {value:.0%} of the groups all answers got the same reward{mean}, so there is nothing to learn: take "
            "prompts of another difficulty, a larger group_size, or algorithm.dynamic_sampling"
        )

    def _abstained(self, value: float, metrics: Metrics) -> str:
        if value == 0 or "reward/mean" in metrics:
            return ""
        return "no reward has judged any row, so nothing is learned: does each function of reward_fn return a number?"

    def _truncated(self, value: float, metrics: Metrics) -> str:
        if value < TRUNCATED:
            return ""
        return (
            f"{value:.0%} of the responses are cut at the limit: raise max_response_length, set "
            "algorithm.overlong_share, or see whether the model knows its end token"
        )


class _Condition:
    """A sign that counts once it was there in ``patience`` steps in a row; steps without the metric say nothing."""

    def __init__(self, name: str, patience: int, rule: Callable[[float, Metrics], str]) -> None:
        self._name, self._patience, self._rule = name, patience, rule
        self._signs = self._without = 0  # steps in a row
        self.holds = False

    def see(self, metrics: Metrics) -> str | None:
        if self._name not in metrics:
            return None
        text = self._rule(metrics[self._name], metrics)
        self._signs, self._without = (self._signs + 1, 0) if text else (0, self._without + 1)
        if self._without >= CLEAR:
            self.holds = False
        if self.holds or self._signs < self._patience:
            return None
        self.holds = True
        steps = "this step" if self._patience == 1 else f"the last {self._patience} steps"
        return f"{self._name}, {steps}: {text}"
