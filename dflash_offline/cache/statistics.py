"""Statistics of each kept layer, and the states that they give away: all zero, constant, or repeated.

Hidden states captured wrongly are the quietest failure of such tools: training goes well and nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from dflash_offline.cache.receipts import LayerStatistics

_PIECE_VALUES = 1 << 26
_PEAKS = 3
_SAME = 1e-6


def layer_statistics(hidden_TLH: Tensor, decoded_TLH: Tensor) -> list[LayerStatistics]:
    """Statistics of every layer over the tokens whose states are finite.

    Mean, standard deviation, absolute maximum, share of zeros and spread of the norms describe ``decoded_TLH``, what a
    reader will see, so that a reader can check them. Errors are |decoded - hidden| / |hidden| of each token's vector;
    "without peaks" leaves out the three channels with the most energy in the layer, which otherwise hide damage to the
    rest.

    Args:
        hidden_TLH: [T, L, H] bfloat16 as captured.
        decoded_TLH: the same, encoded and decoded.

    Returns:
        One entry a layer; all zero where no token is finite.
    """
    T, L, H = hidden_TLH.shape
    usable_T = hidden_TLH.isfinite().all(-1).all(-1) & decoded_TLH.isfinite().all(-1).all(-1)
    if not bool(usable_T.all()):
        hidden_TLH, decoded_TLH = hidden_TLH[usable_T], decoded_TLH[usable_T]
        T = hidden_TLH.shape[0]
    names = LayerStatistics.model_fields
    if T == 0:
        return [LayerStatistics(**dict.fromkeys(names, 0.0)) for _ in range(L)]
    step = max(1, _PIECE_VALUES // (L * H))
    pieces = [(hidden_TLH[i : i + step].float(), decoded_TLH[i : i + step].float()) for i in range(0, T, step)]
    energy_LH = reduce(torch.add, (hidden.square().sum(0, dtype=torch.float64) for hidden, _ in pieces))
    peaks_LK = energy_LH.topk(min(_PEAKS, H - 1), dim=-1).indices
    parts = []
    for hidden, decoded in pieces:
        error, size = (decoded - hidden).square(), hidden.square()
        index = peaks_LK.expand(hidden.shape[0], -1, -1)
        error_all, size_all = error.sum(-1).double(), size.sum(-1).double()
        error_rest = error.scatter(-1, index, 0.0).sum(-1).double()
        size_rest = size.scatter(-1, index, 0.0).sum(-1).double()
        parts.append(
            torch.stack(
                (
                    decoded.sum(-1).double(),
                    decoded.square().sum(-1).double(),
                    decoded.abs().amax(-1).double(),
                    (decoded == 0).sum(-1).double(),
                    _ratio(error_all, size_all),
                    _ratio(error_rest, size_rest),
                )
            )
        )
    total, squares, peak, zeros, error, error_rest = torch.cat(parts, 1)
    count = T * H
    mean = total.sum(0) / count
    variance = (squares.sum(0) / count - mean.square()).clamp(min=0)
    norm = squares.sqrt()
    columns = (
        mean,
        variance.sqrt(),
        peak.amax(0),
        zeros.sum(0) / count,
        _ratio(norm.var(0, correction=0), norm.mean(0).square()),
        error.mean(0),
        error.amax(0),
        error_rest.mean(0),
        error_rest.amax(0),
    )
    table = torch.stack(columns, 1).cpu().tolist()
    return [LayerStatistics(**dict(zip(names, row, strict=True))) for row in table]


def _ratio(squares: Tensor, base: Tensor) -> Tensor:
    """Square root of squares / base; 0 where both are 0."""
    return torch.where(squares > 0, (squares / base.clamp(min=torch.finfo(torch.float64).tiny)).sqrt(), 0.0)


def check_layer_statistics(layers: Sequence[LayerStatistics], layer_ids: Sequence[int], tokens: int) -> list[str]:
    """What is wrong with captured states, one line a finding; empty where nothing is.

    Found are layers that are all zero, that hold one value, whose vector is the same at every token (looked for from
    eight tokens on), and two layers with equal statistics, which are one layer captured twice.

    Args:
        layers: statistics of a shard.
        layer_ids: the target's layer id of each.
        tokens: tokens they were taken over.
    """
    problems = []
    for place, (layer, layer_id) in enumerate(zip(layers, layer_ids, strict=True)):
        if layer.abs_max == 0:
            problems.append(f"layer {layer_id}: every hidden state is zero")
        elif layer.std <= _SAME * layer.abs_max:
            problems.append(f"layer {layer_id}: every hidden state has the one value {layer.mean:g}")
        elif tokens >= 8 and layer.norm_spread <= _SAME:
            problems.append(f"layer {layer_id}: the hidden state is the same at every token")
        for other, other_id in zip(layers[:place], layer_ids, strict=False):
            if layer.abs_max and (layer.mean, layer.std, layer.abs_max) == (other.mean, other.std, other.abs_max):
                problems.append(f"layers {other_id} and {layer_id}: their hidden states are the same")
    return problems
