"""A loaded target: capture the outputs of chosen decoder layers, and no more work than that.

Shapes: R rows, T tokens, L kept layers, H hidden, V vocabulary. Capturing runs the decoder stack up to the last wanted
layer and never the head: 1.03 to 1.05 times the rate of a whole forward pass with all hidden states at 8B and 27B.
Batches are right-padded and carry no attention mask: in a causal model, hybrid ones too, what comes later changes
nothing that came before.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target.compiled import PassSize, compile_token_wise
from dflash_offline.target.heads import HeadsInfo, embedding_of, probe_heads
from dflash_offline.target.layers import check_layer_ids
from dflash_offline.target.load import decoder_layers, final_norm, load_causal_lm
from dflash_offline.target.resolve import ResolvedTarget, resolve_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def load_target(
    cfg: TargetConfig,
    device: str | torch.device = "cpu",
    layer_ids: Sequence[int] | None = None,
    stop_early: bool = True,
    device_map: str | dict[str, Any] | None = None,
) -> Target:
    """Load a target's text model and head onto a device, in the recipe's dtype.

    Args:
        cfg: the recipe's target.
        device: where the weights go.
        layer_ids: layers to capture; default: the recipe's, else the DFlash rule.
        stop_early: whether `Target.capture` ends at the last wanted layer.
        device_map: spread the layers over devices, see `load_causal_lm`.

    Raises:
        UsageError: the target or a layer id cannot be right (see `resolve_target`).
        DFlashOfflineError: weights are missing, or the hub could not be reached.
    """
    resolved = resolve_target(cfg)
    ids = resolved.layer_ids() if layer_ids is None else check_layer_ids(layer_ids, resolved.num_layers)
    return Target(load_causal_lm(resolved, device, device_map=device_map), resolved, ids, stop_early=stop_early)


class CapturedStates:
    """Outputs of the captured layers of the latest forward pass inside `Target.capturing`."""

    def __init__(self, count: int) -> None:
        self.layers: list[Tensor | None] = [None] * count

    def stacked(self) -> Tensor:
        """Hidden states [R, T, L, H].

        Raises:
            DFlashOfflineError: no forward pass has reached every layer yet.
        """
        present = [layer for layer in self.layers if layer is not None]
        if len(present) < len(self.layers):
            raise DFlashOfflineError("the target has not run through all captured layers inside `capturing()`")
        return torch.stack(present, dim=2)


class Target:
    """A causal language model whose hidden states are captured.

    Attributes:
        model: the whole causal language model, head included.
        text_model: its decoder stack (embedding, layers, final norm).
        embed_tokens: its embedding module, which scales its rows itself in the families that scale in the module.
        lm_head: the output head.
        resolved: where it came from.
        config: configuration of the text model.
        layer_ids: 0-based ids of the captured layers, increasing.
    """

    def __init__(
        self, model: PreTrainedModel, resolved: ResolvedTarget, layer_ids: Sequence[int], stop_early: bool = True
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.resolved = resolved
        self.config = resolved.config
        self.layer_ids = check_layer_ids(layer_ids, resolved.num_layers)
        self.text_model: nn.Module = model.get_decoder()
        self.embed_tokens = embedding_of(model)
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.stop_early = stop_early
        self._layers_name, self._layers = decoder_layers(self.text_model, resolved.num_layers)
        self._stack = self._up_to_last() if stop_early else self.text_model
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(type(self.text_model).forward).parameters else "past_key_values"
        )
        self._heads_info: HeadsInfo | None = None
        self._pass_size: PassSize | None = None

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states."""
        return self.resolved.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole target."""
        return self.resolved.num_layers

    @property
    def vocab_size(self) -> int:
        """Rows V of the embedding."""
        return self.resolved.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.embed_tokens.weight.dtype

    @torch.no_grad()
    def capture(self, input_ids_RT: Tensor, always_compiled: bool = False) -> Tensor:
        """Outputs of the kept layers.

        The states of a row's real tokens do not depend on its padding or on the other rows. In the bits this holds
        where the kernels reduce alike for every shape; on CPU another padded shape may round differently in the last
        bit (about 1e-6 relative in float32).

        Args:
            input_ids_RT: token ids, right-padded with any valid id.
            always_compiled: after `prepare_compiled`, use the compiled parts however few tokens there are.

        Returns:
            Hidden states [R, T, L, H] in the target's dtype, on its device.

        Raises:
            DFlashOfflineError: an id is outside the vocabulary, or a layer did not run.
        """
        ids_RT = self._ids(input_ids_RT)
        rows, tokens = ids_RT.shape
        out = torch.empty(
            rows, tokens, len(self.layer_ids), self.hidden_size, dtype=self.dtype, device=ids_RT.device
        )  # RTLH
        seen: set[int] = set()

        def keep(index: int, hidden_RTH: Tensor) -> None:
            out[:, :, index].copy_(hidden_RTH)
            seen.add(index)

        size = self._pass_size
        compiled = contextlib.nullcontext() if size is None else size.of(rows * tokens, always_compiled)
        with self._hooks(keep), compiled:
            self._stack(input_ids=ids_RT, use_cache=False)
        if len(seen) < len(self.layer_ids):
            raise DFlashOfflineError(f"the target did not run layers {self.layer_ids}: only {len(seen)} gave an output")
        return out

    @torch.no_grad()
    def capture_reference(self, input_ids_RT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same states from transformers' own ``output_hidden_states``, by a pass through the whole model.

        Returns:
            Hidden states [R, T, L, H] (the last layer's own output, which transformers does not return, by a hook),
            logits [R, T, V] and the final-normed state [R, T, H].
        """
        ids_RT = self._ids(input_ids_RT)
        last: list[Tensor] = []
        handle = self._layers[-1].register_forward_hook(lambda _m, _a, output: last.append(_hidden(output)))
        try:
            output = self.model(input_ids=ids_RT, use_cache=False, output_hidden_states=True)
        finally:
            handle.remove()
        states = [
            output.hidden_states[i + 1] if i < self.num_layers - 1 else last[0] for i in self.layer_ids
        ]  # hidden_states[n] comes after the final norm
        home = self.device  # the layers may be spread over several
        stacked = torch.stack([state.to(home) for state in states], dim=2)
        return stacked, output.logits.to(home), output.hidden_states[-1].to(home)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[CapturedStates]:
        """Capture the kept layers of every forward pass of `model` inside the context; the latest pass is kept."""
        states = CapturedStates(len(self.layer_ids))

        def keep(index: int, hidden_RTH: Tensor) -> None:
            states.layers[index] = hidden_RTH

        with self._hooks(keep):
            yield states

    def new_cache(self) -> Any:
        """An empty transformers cache for decoding, hybrid targets included."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    @torch.no_grad()
    def forward_decode(
        self, input_ids_1n: Tensor, cache: Any, positions_1n: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run new tokens through the whole model and extend its cache.

        Args:
            input_ids_1n: the n new tokens.
            cache: what `new_cache` gave, holding the tokens before; extended in place.
            positions_1n: their positions; default: following the cache.

        Returns:
            Logits [1, n, V] and the kept layers' states [1, n, L, H].
        """
        extra: dict[str, Any] = {self._cache_argument: cache}
        if positions_1n is not None:
            extra["position_ids"] = positions_1n
        with self.capturing() as states:
            output = self.model(input_ids=input_ids_1n.to(self.device), use_cache=True, **extra)
        return output.logits, states.stacked()

    def heads_info(self) -> dict[str, Any]:
        """How embedding, final norm and head compute; see `HeadsInfo`. Measured once by a pass over a few tokens."""
        return self._heads().as_dict()

    def heads(self) -> dict[str, Tensor]:
        """``embed_tokens.weight`` [V, H], ``norm.weight`` [H] and, unless tied, ``lm_head.weight`` [V, H]."""
        info = self._heads()
        return info.tensors(self.embed_tokens, self.lm_head, final_norm(self.text_model)[1])

    @property
    def is_compiled(self) -> bool:
        """Whether `prepare_compiled` found something to compile."""
        return self._pass_size is not None

    def prepare_compiled(self, tokens: int, backend: Any = "inductor") -> int:
        """Compile the token-wise parts of every layer (norms, dense MLPs) for passes of up to ``tokens`` tokens.

        `capture` pads what they see to that one size, so no length compiles anew; passes that are longer, or much
        shorter, and everything but `capture`, run uncompiled. Attention stays as it is.

        Args:
            tokens: R * T of the largest pass.
            backend: of `torch.compile`.

        Returns:
            How many modules are compiled on their first use.
        """
        size = PassSize(tokens)
        count = compile_token_wise(self._layers, size, backend)
        if count:
            self._pass_size = size
        return count

    def release_unused(self) -> None:
        """Free the layers past the last wanted one and the head; only `capture` works afterwards."""
        self._heads()
        self._stack = self._up_to_last()
        self.text_model = self._stack
        self.model = self.lm_head = None  # type: ignore[assignment]
        self._layers = self._layers[: self.layer_ids[-1] + 1]

    def _heads(self) -> HeadsInfo:
        if self._heads_info is None:
            self._heads_info = probe_heads(self.model, self.config)
        return self._heads_info

    def _up_to_last(self) -> nn.Module:
        """The text model as a shallow copy that shares all weights, cut behind the last wanted layer, without norm."""
        stack = copy.copy(self.text_model)
        stack._modules = dict(self.text_model._modules)
        stack._modules[self._layers_name] = nn.ModuleList(list(self._layers)[: self.layer_ids[-1] + 1])
        stack._modules[final_norm(self.text_model)[0]] = nn.Identity()
        return stack

    @contextlib.contextmanager
    def _hooks(self, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
        handles = [
            self._layers[layer_id].register_forward_hook(lambda _m, _a, output, i=index: keep(i, _hidden(output)))
            for index, layer_id in enumerate(self.layer_ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ids(self, input_ids_RT: Tensor) -> Tensor:
        if input_ids_RT.ndim != 2:
            raise UsageError(f"token ids must be [rows, tokens], not of shape {tuple(input_ids_RT.shape)}")
        if input_ids_RT.device.type == "cpu" and input_ids_RT.numel():
            low, high = (int(value) for value in input_ids_RT.to(torch.int64).aminmax())
            if low < 0 or high >= self.vocab_size:
                wrong = low if low < 0 else high
                raise DFlashOfflineError(
                    f"token id {wrong} is outside the target's vocabulary of {self.vocab_size}: the tokens were made "
                    "with another tokenizer; prepare the cache again with the target's own"
                )
        return input_ids_RT.to(device=self.device, dtype=torch.int64)


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
