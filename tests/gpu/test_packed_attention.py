"""The packed attention kernel on a GPU beside the plain masked form, forward and backward."""

from __future__ import annotations

import pytest
import torch

from verl.batch import Ragged
from verl.models.packing import AttentionOptions, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_kernel_equals_masked_attention(window, kv_heads):
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, 99, (20,), generator=g).tolist()
    prompts = Ragged.from_rows([[*start, 1, 2], [*start, 1, 2], [*start, 3], [*start, *[4] * 30]])
    responses = Ragged.from_rows([list(range(n)) for n in (9, 1, 40, 3)])
    packed = pack(prompts, responses, [0, 0, 1, 2]).to("cuda")
    t = len(packed)
    qkv = [torch.randn(t, h, 64, generator=g).to("cuda", torch.bfloat16) for h in (4, kv_heads, kv_heads)]
    options = AttentionOptions(window=window)
    outputs, grads = [], []
    for dtype in (torch.bfloat16, torch.float32):  # float32 takes the masked form
        tensors = [x.detach().to(dtype).requires_grad_() for x in qkv]
        out = packed.attend(0, *tensors, options)
        out.float().square().sum().backward()
        outputs.append(out.detach().float())
        grads.append([x.grad.float() for x in tensors])
    assert (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 1e-2
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() / b.norm() < 2e-2
