"""Before its first shard each worker runs one short real batch through the whole model.

The captured states must be those that transformers itself calls ``hidden_states``, row by row, and the last layer's
output through the norm and the head that the cache stores must give the model's own next tokens. It costs one pass over
a few hundred tokens, and catches hooks that give zeros or the neighbouring layer, rows of a batch mixed up, broken
weights, and a cache whose head is another model's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dflash_offline.errors import DFlashOfflineError
from dflash_offline.target.load import final_norm

if TYPE_CHECKING:
    from dflash_offline.cache import Cache
    from dflash_offline.target import Target

logger = logging.getLogger(__name__)

CHECK_SAMPLES = 8
CHECK_TOKENS = 48
GPU_TOLERANCE = 1e-2


class SelfCheckFailed(DFlashOfflineError):
    """The target does not give the states that it should; nothing was written."""


def check_batch(cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """The beginnings of a few samples of the cache, of unequal lengths.

    Returns:
        Token ids int64 [R, T], right-padded with 0, and lengths [R].
    """
    rows: list[np.ndarray] = []
    for shard in range(cache.num_shards):
        input_ids, _ = cache.read_tokens(shard)
        start = 0
        for sample in cache.shard_samples(shard):
            length = int(cache.samples.length[sample])
            # Rows of unequal length, so that padding is part of what is checked.
            rows.append(input_ids[start : start + min(length, CHECK_TOKENS - len(rows))].astype(np.int64))
            start += length
            if len(rows) == CHECK_SAMPLES:
                break
        if len(rows) == CHECK_SAMPLES:
            break
    lengths = np.array([len(row) for row in rows])
    ids_RT = np.zeros((len(rows), int(lengths.max())), np.int64)
    for place, row in enumerate(rows):
        ids_RT[place, : len(row)] = row
    return ids_RT, lengths


@torch.inference_mode()
def check_target(cache: Cache, target: Target) -> None:
    """Compare what ``target`` captures with the whole model's own hidden states and next tokens.

    Rows that give NaN or infinity are left out (a single bad sample is for the shard job to drop) unless all do.

    Raises:
        SelfCheckFailed: something differs; the message says what and by how much.
    """
    ids, lengths = check_batch(cache)
    ids_RT = torch.from_numpy(ids)
    captured = [("", target.capture(ids_RT))]
    if target.is_compiled:
        captured.append((" by compiled parts", target.capture(ids_RT, always_compiled=True)))
    last: list[Tensor] = []
    hook = final_norm(target.text_model)[1].register_forward_pre_hook(lambda _module, args: last.append(args[0]))
    try:
        reference_RTLH, logits_RTV, _ = target.capture_reference(ids_RT)
    finally:
        hook.remove()
    wanted_ids = cache.manifest.identity.target_layer_ids
    expected = (*ids.shape, len(wanted_ids), cache.manifest.layout.hidden_size)
    shape = tuple(captured[0][1].shape)
    if list(target.layer_ids) != wanted_ids or shape != expected:
        raise SelfCheckFailed(
            f"the target captures layers {list(target.layer_ids)} as {shape}, the cache holds "
            f"layers {wanted_ids} as {expected}"
        )
    heads = cache.heads(target.device)
    normed_RTH = _stored_norm(last[-1].to(target.device), heads["norm.weight"], cache.heads_info())
    head_VH = heads.get("lm_head.weight", heads["embed_tokens.weight"]).to(normed_RTH.dtype)
    checked = 0
    for row, length in enumerate(lengths):
        logits_TV, normed_TH = logits_RTV[row, :length], normed_RTH[row, :length]
        reference_TLH = reference_RTLH[row, :length]
        if not (_finite(reference_TLH) and _finite(logits_TV)):
            continue
        checked += 1
        for how, states_RTLH in captured:
            exact = states_RTLH.device.type == "cpu" and not how
            _check_row(states_RTLH[row, :length], reference_TLH, wanted_ids, exact, row, how)
        wrong = _wrong_predictions(head_VH, normed_TH, logits_TV)
        if wrong:
            raise SelfCheckFailed(
                f"self-check: the cache's norm and head give another next token than the model at {wrong} of "
                f"{length} positions in row {row}: target/heads.safetensors is not this model's. Prepare the cache "
                "again."
            )
    if not checked:
        raise SelfCheckFailed(
            f"self-check: the target gives NaN or infinity on all of the first {len(lengths)} samples: its weights are "
            f"broken, or target.dtype ({str(target.dtype).removeprefix('torch.')}) is too narrow for it"
        )


def _check_row(have_TLH: Tensor, reference_TLH: Tensor, layer_ids: list[int], exact: bool, row: int, how: str) -> None:
    for place, layer_id in enumerate(layer_ids):
        have, want = have_TLH[:, place], reference_TLH[:, place]
        error = _relative_error(have, want)
        if not (torch.equal(have, want) if exact else error <= GPU_TOLERANCE):
            raise SelfCheckFailed(
                f"self-check: the captured output of layer {layer_id}{how} differs from the model's own "
                f"hidden_states[{layer_id + 1}] by {error:.3g} relative, in row {row} of the batch"
                f"{_hint(have, reference_TLH, layer_ids)}. Nothing was written."
            )


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _relative_error(have: Tensor, want: Tensor) -> float:
    have, want = have.float(), want.float()
    return float((have - want).norm() / want.norm().clamp_min(1e-30))


def _hint(have: Tensor, reference_TLH: Tensor, layer_ids: list[int]) -> str:
    if not have.any():
        return ": it is all zero"
    for place, layer_id in enumerate(layer_ids):
        if _relative_error(have, reference_TLH[:, place]) <= GPU_TOLERANCE:
            return f": it is that of layer {layer_id}"
    return ""


def _stored_norm(last_RTH: Tensor, weight_H: Tensor, info: dict[str, Any]) -> Tensor:
    """Final RMS norm (Zhang and Sennrich 2019) as the cache describes it, in the dtype of its input."""
    last = last_RTH.float()
    unit = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + info["norm_eps"])
    return (unit * (info["norm_offset"] + weight_H.float())).to(last_RTH.dtype)


def _wrong_predictions(head_VH: Tensor, normed_TH: Tensor, logits_TV: Tensor) -> int:
    """Positions at which the stored head's best token is not (within rounding) the model's."""
    best_T1 = (normed_TH @ head_VH.T).argmax(-1, keepdim=True)
    logits_TV = logits_TV.float()
    top_T = logits_TV.amax(-1)
    return int((logits_TV.gather(-1, best_T1)[:, 0] < top_T - GPU_TOLERANCE * top_T.abs().clamp_min(1.0)).sum())
