"""Does this model compute the same on packed rows as by itself? Asked once at load, of a few tokens.

Attention on packed rows replaces the model's own. What a model does beside it (position biases, recurrent layers,
chunked windows, output scaling) would go wrong without a sound, so every loaded model has to show that it doesn't.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl.batch import Ragged
from verl.config.errors import RequestError
from verl.models.decoder import base_model
from verl.models.packing import ATTENTION, AttentionOptions, Packed, last_hidden, pack, set_attention
from verl.models.policy import Policy
from verl.models.scorer import Scorer, is_scorer

LAYER_TYPES = {"full_attention", "sliding_attention"}
ROPE_TYPES = {"dynamic", "longrope"}  # their angles depend on the longest row of the call
PROMPT, RESPONSES = 6, (4, 3)  # tokens


class _Watched:
    """A layout that notes the window each layer asks for."""

    def __init__(self, packed: Packed) -> None:
        self.packed, self.windows = packed, {}  # type: Packed, dict[int, int | None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.windows[layer] = options.window
        return self.packed.attend(layer, q, k, v, options)


def probe(lm: nn.Module) -> None:
    """Compare logits of packed rows with those of the model's own (eager) attention, row by row; of a scorer, whose
    one number says little, and of a decoder without a head, the hidden states.

    Raises ``RequestError`` that names the model class and what differs. Costs three forwards of about ten tokens.
    """
    base = base_model(lm)
    config = base.config.get_text_config()
    _refuse(base, config)
    bare = not is_scorer(base) and base.get_output_embeddings() is None
    model = None if bare else Scorer(lm) if is_scorer(base) else Policy(lm)
    backbone = base if model is None else model.backbone
    embeddings: Any = base.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    ids = torch.arange(1, PROMPT + sum(RESPONSES) + 1) * 7919 % vocabulary
    prompt, *responses = ids.split([PROMPT, *RESPONSES])
    packed = pack(Ragged.from_rows([prompt] * 2), Ragged.from_rows(responses), [0, 0]).to(embeddings.weight.device)
    watched = _Watched(packed)
    with torch.no_grad():
        try:
            hidden = last_hidden(backbone, packed.ids, packed.positions, watched)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise RequestError(f"{type(base).__name__} does not compute on packed rows: {error}") from error
        hidden = hidden[packed.predict.values]
        ours = model.logits(hidden) if isinstance(model, Policy) else hidden.float()
        set_attention(base, "eager")
        try:
            parts = []
            for r in responses:
                ids = torch.cat([prompt, r])[None].to(packed.ids.device)
                if isinstance(model, Policy):
                    parts.append(lm(input_ids=ids, use_cache=False).logits)
                else:
                    parts.append(backbone(input_ids=ids, use_cache=False).last_hidden_state)
            theirs = torch.cat([part[0, PROMPT - 1 : -1] for part in parts]).float()
        finally:
            set_attention(base, ATTENTION)
    _check_windows(base, config, watched.windows)
    gap = ((ours - theirs).norm() / (theirs - theirs.mean(-1, keepdim=True)).norm()).item()
    tolerance = 1e-3 if embeddings.weight.dtype == torch.float32 else 0.15  # bf16 rounds twice along different ways
    if not gap <= tolerance:
        what = "logits" if isinstance(model, Policy) else "hidden states"
        if not (ours.isfinite().all() and theirs.isfinite().all()):
            raise _not_finite(lm, what)
        raise RequestError(
            f"{type(base).__name__} gives other {what} on packed rows than by itself (relative difference {gap:.2g}, "
            f"{tolerance:g} is allowed), so training it here would be wrong; this architecture is not supported"
        )


def _not_finite(lm: nn.Module, what: str) -> RequestError:
    """Names the first weight that holds NaN or infinity; of a sharded model, each rank looks through its own part."""
    found = "a weight is, or they grow beyond the dtype"
    for name, parameter in lm.named_parameters():
        mine: Tensor = getattr(parameter, "to_local", lambda p=parameter: p)().detach()
        wide = mine.is_floating_point() and mine.element_size() > 1  # what is quantised has scales that are
        if wide and (bad := int((~mine.isfinite()).sum())):
            found = f"{bad} of {mine.numel()} numbers in {name} are NaN or infinite"
            break
    return RequestError(f"{type(base_model(lm)).__name__} computes {what} that are not finite: {found}")


def _refuse(base: nn.Module, config: Any) -> None:
    """What ten tokens can't show."""
    name = type(base).__name__
    other = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if other:
        raise RequestError(
            f"{name} has layers of type {', '.join(sorted(other))}; "
            "packed rows work with full and sliding attention only"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & ROPE_TYPES:
        raise RequestError(
            f"{name} has rotary positions of type {', '.join(sorted(kinds & ROPE_TYPES))}: its numbers for a row "
            "depend on the longest row computed beside it, so packed rows would differ from single ones"
        )


def _check_windows(base: nn.Module, config: Any, asked: dict[int, int | None]) -> None:
    """Sliding layers must have asked for their window, the others for none."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None)
    for layer, got in asked.items():
        wanted = window if types is None or types[layer] == "sliding_attention" else None
        if got != wanted:
            raise RequestError(
                f"{type(base).__name__} asked for window {got} in layer {layer}, its configuration says {wanted}; "
                "this architecture is not supported on packed rows"
            )
