"""Log-probabilities over a head cut by words: values and gradients as of the whole head."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engines.ranks import run
from verl.engines import vocab_parallel
from verl.models.logprobs import token_logprobs

N, D = 11, 8
WEIGHTS = torch.linspace(-1, 1, N)  # of each token in the loss


def inputs(vocabulary: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, head = (3 * torch.randn(n, D, generator=g).to(dtype) for n in (N, vocabulary))
    return [hidden, head, torch.randint(0, vocabulary, (N,), generator=g)]


def loss(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    return (logprobs * WEIGHTS).sum() + (0 if entropy is None else 0.3 * (entropy * WEIGHTS.square()).sum())


def parts(vocabulary: int, options: dict, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Of this rank: outputs, the gradient of hidden states, and of its rows of the head."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden, head, targets = inputs(vocabulary, dtype)
    rows = -(-vocabulary // ranks)
    mine = torch.zeros(rows, D, dtype=dtype)
    words = head[rank * rows : (rank + 1) * rows]
    mine[: len(words)] = words
    hidden.requires_grad_(), mine.requires_grad_()
    out = vocab_parallel.token_logprobs(hidden, mine, targets, dist.group.WORLD, vocabulary, **options)
    loss(*out).backward()
    return [None if x is None else x.detach() for x in (*out, hidden.grad, mine.grad)]


@pytest.mark.parametrize("vocabulary", [8, 13, 5])  # over 4 ranks: evenly, filled up, one rank without a word
@pytest.mark.parametrize(
    "options",
    [
        {"with_entropy": True, "temperature": 0.7},
        {"with_entropy": True, "chunk": 3, "keep_bytes": 0},
        {"chunk": 4, "temperature": 1.5},
    ],
    ids=str,
)
def test_as_of_the_whole_head(vocabulary, options):
    hidden, head, targets = inputs(vocabulary, torch.float32)
    hidden.requires_grad_(), head.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, head, None, targets, **options)
    loss(logprobs, entropy).backward()
    ranks = run(4, parts, vocabulary, options, torch.float32)
    for out in ranks:
        torch.testing.assert_close(out[0], logprobs.detach())
        assert (out[1] is None) == (entropy is None)
        if entropy is not None:
            torch.testing.assert_close(out[1], entropy.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[2], hidden.grad, atol=1e-5, rtol=1e-5)
    grad = torch.cat([out[3] for out in ranks])
    torch.testing.assert_close(grad[:vocabulary], head.grad, atol=1e-5, rtol=1e-5)
    assert not grad[vocabulary:].any()


@pytest.mark.parametrize("vocabulary", [13, 5])
def test_bf16_gradients_are_those_of_the_whole_head(vocabulary):
    """Run by run, and but for a last digit where the sums of the softmax were added in another order."""
    options = {"with_entropy": True, "chunk": 1}
    hidden, head, targets = inputs(vocabulary, torch.bfloat16)
    hidden.requires_grad_(), head.requires_grad_()
    loss(*token_logprobs(hidden, head, None, targets, **options)).backward()
    ranks = run(4, parts, vocabulary, options, torch.bfloat16)
    grad = torch.cat([out[3] for out in ranks])[:vocabulary]
    assert (grad == head.grad).float().mean() > 0.9
    torch.testing.assert_close(grad, head.grad, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(ranks[0][2], hidden.grad, rtol=2**-7, atol=1e-4)  # sums that nearly cancel


def test_bf16_keeps_float32_numbers():
    hidden, head, targets = inputs(13, torch.bfloat16)
    expected, _ = token_logprobs(hidden, head, None, targets)
    for logprobs, _, grad, _ in run(2, parts, 13, {}, torch.bfloat16):
        assert logprobs.dtype == torch.float32 and grad.dtype == torch.bfloat16
        torch.testing.assert_close(logprobs, expected, atol=2e-2, rtol=1e-2)
