"""G12: KTO's baseline needs responses drawn independently of the prompt; batches are odd, of one row or one-sided."""

from __future__ import annotations

from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forks import FORKS
from verl.algorithms.preference import kto, kto_baseline, kto_means, kto_statistics, mismatch

BETA = 0.5
# (desirable, log-ratio, log-ratio with the neighbour's response) of the rows of two ranks: all true, all false
RANKS = [[(True, 2.0, 1.0), (True, -1.0, 0.4), (True, 0.5, 0.1)], [(False, 1.5, -0.3)]]


def test_rotation_never_matches_a_row_with_itself():
    completions = ["y0", "y1", "y2"]
    assert [completions[i] for i in mismatch(range(3))] == ["y1", "y2", "y0"]
    for n in range(2, 12):
        partners = mismatch(range(n))
        assert sorted(partners) == list(range(n)) and all(i != partner for i, partner in enumerate(partners))


@pytest.mark.parametrize("n", [0, 1])
def test_a_batch_of_one_is_refused(n):
    with pytest.raises(ValueError, match=f"KTO needs at least two rows per batch, this one has {n}"):
        mismatch(range(n))


def test_a_last_batch_of_one_has_a_partner_from_another_batch():
    partners = mismatch(range(5))
    batches = [list(range(5))[k : k + 2] for k in range(0, 5, 2)]
    assert batches[-1] == [4] and partners[4] == 0


@pytest.mark.parametrize("side", [True, False])
def test_a_one_sided_batch(side):
    logratios = torch.tensor([0.3, -2.0, 1e5], requires_grad=True)
    desirable = torch.full((3,), side)
    out = kto(logratios, desirable, kto_baseline(torch.tensor(0.9), 3), BETA)
    out.losses.sum().backward()
    assert out.losses.isfinite().all() and logratios.grad.isfinite().all()
    here, there = ("desirable", "undesirable") if side else ("undesirable", "desirable")
    sums = kto_statistics(out, desirable)
    assert (sums[here], sums[there]) == (3, 0)
    means = kto_means(sums)
    assert set(means) == {f"{here}_reward"}
    assert means[f"{here}_reward"] == pytest.approx(BETA * (0.3 - 2.0 + 1e5) / 3)


def test_the_absent_side_cannot_poison_the_other():
    desirable = torch.tensor([True, True])
    out = kto(torch.tensor([1.0, 3.0]), desirable, torch.tensor(0.0), BETA)
    sums = kto_statistics(out._replace(rewards=torch.tensor([1.0, torch.nan])), torch.tensor([True, False]))
    assert kto_means(sums)["desirable_reward"] == 1.0


@pytest.mark.parametrize("total", [-4.0, 0.0, 4.0])
def test_the_estimate_is_detached_and_not_below_0(total):
    logratios = torch.tensor([total / 2, total / 2], requires_grad=True)
    z = kto_baseline(logratios.sum(), 2)
    assert not z.requires_grad and z.item() == max(total / 2, 0.0)
    # even a baseline that carries a graph gets no gradient
    kto(torch.ones(2, requires_grad=True), torch.tensor([True, False]), logratios.mean(), BETA).losses.sum().backward()
    assert logratios.grad is None


def one_rank(folder: Path, rank: int, results: SimpleQueue) -> None:
    """What one data-parallel rank does: the baseline and the statistics are sums over ranks, of equal shapes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(RANKS))
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss, gradient, sums = share(theta, RANKS[rank], *summed([baseline_parts(RANKS[rank])])[0])
    reduced = summed([[loss, gradient], list(sums.values())])
    results.put((rank, reduced[0], dict(zip(sums, reduced[1], strict=True))))
    dist.destroy_process_group()


def summed(numbers: list[list[float]]) -> list[list[float]]:
    totals = []
    for parts in numbers:
        tensor = torch.tensor(parts, dtype=torch.float64)
        dist.all_reduce(tensor)
        totals.append(tensor.tolist())
    return totals


def baseline_parts(rank: list[tuple[bool, float, float]]) -> list[float]:
    return [sum(other for _, _, other in rank), len(rank)]


def share(theta: torch.Tensor, rank: list[tuple[bool, float, float]], total: float, count: float):
    desirable = torch.tensor([side for side, _, _ in rank])
    logratios = theta * torch.tensor([ratio for _, ratio, _ in rank], dtype=torch.float64)
    z = kto_baseline(torch.tensor(total, dtype=torch.float64), int(count))
    out = kto(logratios, desirable, z, BETA)
    loss = out.losses.sum() / count
    loss.backward()
    return loss.item(), theta.grad.item(), {name: float(x) for name, x in kto_statistics(out, desirable).items()}


def test_two_ranks_with_one_side_each(tmp_path):
    results = FORKS.SimpleQueue()
    ranks = [FORKS.Process(target=one_rank, args=(tmp_path, rank, results)) for rank in range(len(RANKS))]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    got = sorted(results.get() for _ in ranks)
    theta = torch.ones((), dtype=torch.float64, requires_grad=True)
    everyone = RANKS[0] + RANKS[1]
    loss, gradient, sums = share(theta, everyone, *baseline_parts(everyone))  # z = 1.2 / 4
    for _, (rank_loss, rank_gradient), rank_sums in got:
        assert (rank_loss, rank_gradient) == pytest.approx((loss, gradient), rel=1e-12)
        assert rank_sums == pytest.approx(sums)
        # by counts: 3 rows there, 1 here; neither rank's own mean over both sides would be these
        assert kto_means(rank_sums) == pytest.approx({"desirable_reward": 0.25, "undesirable_reward": 0.75})
