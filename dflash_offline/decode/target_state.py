"""The target's cache of one sequence, in which a verification can be undone.

Verification feeds the target a whole block of which only a prefix will stand. Keys and values are cropped back.
Sliding-window layers keep every token (a crop past the window could not bring evicted keys back), so memory grows as in
a full-attention layer: 2 × kv_heads × head_dim values a token and layer, megabytes for evaluation. Recurrent and
convolution states cannot be cropped: they are cloned before each verification, and when a draft is refused the clone is
put back and the accepted tokens are run again, a second forward of at most block_size tokens.

Legend: n new tokens, D = kept layers × H, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_offline.errors import DFlashOfflineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from dflash_offline.target import Target


def cache_argument(text_model: nn.Module) -> str:
    """Name of the cache argument of a transformers text model: ``cache``, or ``past_key_values`` before 5.2x."""
    return "cache" if "cache" in inspect.signature(text_model.forward).parameters else "past_key_values"


@contextmanager
def captured_layers(text_model: nn.Module, num_layers: int, layer_ids: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Within the context, each forward pass fills the dictionary with the outputs of the named decoder layers."""
    from dflash_offline.target.load import decoder_layers

    outputs: dict[int, Tensor] = {}

    def keep(layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = []
    if layer_ids:
        layers = decoder_layers(text_model, num_layers)[1]
        handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def target_forward(
    target: Target,
    layer_ids: tuple[int, ...],
    input_ids_RN: Tensor,
    position_ids_RN: Tensor,
    cache: Any,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """One pass of the target's text model with a cache.

    Returns:
        The final-normed hidden states [R, N, H] (input of the head), and the outputs of ``layer_ids`` [R, N, D].
    """
    import torch

    with captured_layers(target.text_model, target.num_layers, layer_ids) as outputs:
        result = target.text_model(
            input_ids=input_ids_RN,
            position_ids=position_ids_RN,
            use_cache=True,
            **{cache_argument(target.text_model): cache},
            **arguments,
        )
    normed = result.last_hidden_state
    kept = torch.cat([outputs[i] for i in layer_ids], dim=-1) if layer_ids else normed[..., :0]
    return normed, kept


class TargetState:
    """One sequence inside the target: prefill once, then verify and accept in turn.

    Args:
        target: with all its layers (not after ``release_unused``).
        layer_ids: 0-based decoder layers whose output is returned, in the drafter's order.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        self.target = target
        self.layer_ids = layer_ids
        self.length = 0
        cache = DynamicCache(config=target.config)
        cache.layers = [DynamicLayer() if type(x) is DynamicSlidingWindowLayer else x for x in cache.layers]
        self._cache = cache
        self._croppable = [x for x in cache.layers if type(x) is DynamicLayer]
        self._uncroppable = [x for x in cache.layers if type(x) is not DynamicLayer]
        self._pending: Tensor | None = None
        self._snapshots: list[dict[str, Any]] = []

    def prefill(self, input_ids_1n: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens that stand; returns final-normed hidden states [1, n, H] and kept layers [1, n, D]."""
        return self._forward(input_ids_1n, keep=True)

    def verify(self, input_ids_1n: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens of which a prefix may stand; :meth:`accept` must follow before the next call."""
        self._snapshots = [_snapshot(layer) for layer in self._uncroppable]
        return self._forward(input_ids_1n, keep=False)

    def accept(self, count: int) -> None:
        """Keep the first ``count`` of the tokens just verified and undo the rest."""
        if self._pending is None or not 0 <= count <= self._pending.shape[1]:
            raise DFlashOfflineError(f"accept({count}) does not follow a verification of at least that many tokens")
        block, self._pending = self._pending, None
        refused = block.shape[1] - count
        if refused == 0:
            self.length += count
        elif not self._uncroppable:
            self._crop(refused)
            self.length += count
        else:
            self._crop(block.shape[1])
            for layer, state in zip(self._uncroppable, self._snapshots, strict=True):
                _restore(layer, state)
            if count:
                self._forward(block[:, :count], keep=True)
        self._snapshots = []

    def _forward(self, input_ids_1n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        import torch

        if self._pending is not None:
            raise DFlashOfflineError("the last verification was neither accepted nor refused")
        n = input_ids_1n.shape[1]
        positions = torch.arange(self.length, self.length + n, device=input_ids_1n.device)[None]
        out = target_forward(self.target, self.layer_ids, input_ids_1n, positions, self._cache)
        if keep:
            self.length += n
        else:
            self._pending = input_ids_1n
        return out

    def _crop(self, refused: int) -> None:
        for layer in self._croppable:
            if layer.is_initialized:
                assert layer.keys is not None and layer.values is not None
                layer.keys = layer.keys[..., :-refused, :]
                layer.values = layer.values[..., :-refused, :]


def _snapshot(layer: Any) -> dict[str, Any]:
    return {name: _clone(value) for name, value in vars(layer).items()}


def _restore(layer: Any, state: dict[str, Any]) -> None:
    vars(layer).clear()
    vars(layer).update(state)


def _clone(value: Any) -> Any:
    """A copy that later in-place updates of the original cannot reach."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clone(item) for item in value]
    return value
