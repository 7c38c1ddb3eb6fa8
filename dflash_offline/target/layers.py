"""Which decoder layers are kept: the DFlash rule, and the checks on ids that a recipe names.

Layer id i (0-based) means the *output* of decoder layer i. Hugging Face calls it ``hidden_states[i + 1]``, except that
its last entry is taken after the final norm; ours never is.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_offline.errors import UsageError


def default_layer_ids(num_layers: int, count: int) -> list[int]:
    """Layer ids spread by the DFlash rule, ``round(1 + i * (n - 4) / (m - 1))``; the middle layer for one.

    The rule repeats ids where the target is shallow; there the ids are spread evenly from the first layer to the last.

    Args:
        num_layers: decoder layers n of the target.
        count: how many are kept, m.

    Raises:
        UsageError: the target has fewer layers than are to be kept, or ``count`` is not positive.
    """
    if not 1 <= count <= num_layers:
        raise UsageError(
            f"cannot keep {count} layers of a target with {num_layers}: "
            f"set target.num_layers_kept between 1 and {num_layers}"
        )
    if count == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if num_layers < 4 or len(set(ids)) < count:
        ids = [round(i * (num_layers - 1) / (count - 1)) for i in range(count)]
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """The layer ids as a list, if they are distinct, increasing and inside the target.

    Raises:
        UsageError: they are not; the message states the allowed range.
    """
    ids = list(layer_ids)
    allowed = (
        f"target.layer_ids are 0-based and increasing, 0 to {num_layers - 1} for this target of {num_layers} layers"
    )
    if not ids:
        raise UsageError(f"no layer ids given: {allowed}")
    outside = [i for i in ids if not 0 <= i < num_layers]
    if outside:
        raise UsageError(f"layer id {outside[0]} is out of range: {allowed}")
    if len(set(ids)) != len(ids):
        raise UsageError(f"layer ids {ids} name a layer twice: {allowed}")
    if ids != sorted(ids):
        raise UsageError(f"layer ids {ids} are not in increasing order, write {sorted(ids)}: {allowed}")
    return ids
