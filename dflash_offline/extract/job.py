"""One shard job: tokens from the cache → forward passes → encoded states → objects and receipt.

Shapes: R rows of a pass, T tokens, L kept layers, H hidden.

A job has two halves. :meth:`ShardRunner.launch` runs the target over the shard's batches into device memory and, on a
GPU, returns before the GPU has done it. :meth:`ShardRunner.finish` checks, encodes, measures and copies on a stream of
its own while the next shard's passes run, and leaves writing to background threads. On a CPU both run in turn.
Batches are a pure function of the plan, so with fixed threads a repeated job gives the same bytes on a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dflash_offline.cache.plan import padded_length, shard_batches
from dflash_offline.cache.statistics import check_layer_statistics, layer_statistics
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.extract.writer import BufferPool, HostBuffer, Writers, explain_disk

if TYPE_CHECKING:
    from dflash_offline.cache import Cache
    from dflash_offline.target import Target

logger = logging.getLogger(__name__)

NOT_FINITE = "not-finite"
STATE_BUFFERS_GPU = 2  # one computed into, one encoded from
Result = TypeVar("Result")


class WrongStates(DFlashOfflineError):
    """The captured states cannot be right; no retry mends that."""


@dataclass
class LaunchedShard:
    """A shard whose forward passes were started."""

    shard: int
    samples: range
    starts: np.ndarray
    lengths: np.ndarray
    input_ids: np.ndarray
    hidden_TLH: Tensor
    padded_tokens: int
    passes: int
    started_at: float
    computed: torch.cuda.Event | None = None
    rerun: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())


class ShardRunner:
    """Runs the jobs of one worker, one shard after the other.

    Args:
        cache: where tokens come from and states go.
        target: the loaded target; must capture the cache's layers.
        batch_tokens: padded tokens of one forward pass.
        tell: called with what happens: ``tell("done", shard=…)``, ``failed``, ``fatal``, ``waiting``.
        about: what the receipts' ``run`` section says of this worker (device, versions).
    """

    def __init__(
        self,
        cache: Cache,
        target: Target,
        batch_tokens: int,
        tell: Callable[..., None],
        about: dict[str, Any] | None = None,
    ) -> None:
        layout = cache.manifest.layout
        self.cache, self.target, self.batch_tokens = cache, target, batch_tokens
        self.device = torch.device(target.device)
        self._tell = tell
        self._about = about or {}
        self._layer_ids = cache.manifest.identity.target_layer_ids
        gpu = self.device.type == "cuda"
        self._states_TLH = [
            torch.empty(
                layout.shard_tokens,
                layout.num_layers_kept,
                layout.hidden_size,
                dtype=torch.bfloat16,
                device=self.device,
            )
            for _ in range(STATE_BUFFERS_GPU if gpu else 1)
        ]
        self._turn = self._unfinished = 0
        self._side = torch.cuda.Stream(self.device) if gpu else None
        self._pool = BufferPool(layout.hidden_arrays, layout.shard_tokens, pinned=gpu)
        self._writers = Writers(self._write_failed)

    # ---- the two halves ----------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """How many shards may be launched and not finished."""
        return len(self._states_TLH)

    @torch.inference_mode()
    def launch(self, shard: int) -> LaunchedShard:
        """Start the forward passes of a shard.

        Raises:
            DamagedShard: the tokens in the cache do not match their checksums.
            RuntimeError: :attr:`depth` shards are launched and not finished, and hold all the memory for states.
        """
        if self._unfinished == self.depth:
            raise RuntimeError(f"{self.depth} shards are launched already: finish one first")
        started_at = time.time()
        samples = self.cache.shard_samples(shard)
        lengths = self.cache.samples.length[samples.start : samples.stop].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        input_ids, _ = self.cache.read_tokens(shard)
        hidden_TLH = self._states_TLH[self._turn][: int(lengths.sum())]
        self._turn = (self._turn + 1) % len(self._states_TLH)
        batches = shard_batches(lengths, self.batch_tokens)
        padded_tokens = 0
        for first, last, width in batches:
            self._capture_into(hidden_TLH, input_ids, starts[first:last], lengths[first:last], width)
            padded_tokens += (last - first) * width
        launched = LaunchedShard(
            shard, samples, starts, lengths, input_ids, hidden_TLH, padded_tokens, len(batches), started_at
        )
        if self._side is not None:
            launched.computed = torch.cuda.Event()
            launched.computed.record()
        self._unfinished += 1
        return launched

    @torch.inference_mode()
    def finish(self, launched: LaunchedShard) -> None:
        """Check, encode and measure the states of a launched shard, and hand them to the writing threads.

        Shards are finished in the order in which they were launched.

        Raises:
            WrongStates: a layer is zero, constant or repeated.
        """
        try:
            self._finish(launched)
        finally:
            self._unfinished -= 1

    def _finish(self, launched: LaunchedShard) -> None:
        dropped = []
        side = torch.cuda.stream(self._side) if self._side is not None else contextlib.nullcontext()
        buffer = self._pool.lend(lambda begins, seconds: self._tell("waiting", waiting=begins, seconds=seconds))
        try:
            with side:
                if launched.computed is not None:
                    torch.cuda.current_stream().wait_event(launched.computed)
                for sample in self._not_finite(launched, range(len(launched.lengths))):
                    self._run_alone(launched, sample)
                    if self._not_finite(launched, [sample]):
                        dropped.append(sample)
                        start, length = int(launched.starts[sample]), int(launched.lengths[sample])
                        launched.hidden_TLH[start : start + length] = float("nan")
                encoded = self.cache.encoding.encode(launched.hidden_TLH)
                arrays = buffer.fill(encoded)
                layers = layer_statistics(launched.hidden_TLH, self.cache.encoding.decode(encoded))
                if self._side is not None:
                    self._side.synchronize()
        except BaseException:
            self._pool.give_back(buffer)
            raise
        good = launched.tokens - int(launched.lengths[dropped].sum())
        if good and np.unique(launched.input_ids[: launched.tokens]).size > 1:
            problems = check_layer_statistics(layers, self._layer_ids, good)
            if problems:
                self._pool.give_back(buffer)
                raise WrongStates(
                    f"shard {launched.shard}: the captured hidden states cannot be right:\n  "
                    + "\n  ".join(problems)
                    + "\nThe target or its capture is broken (wrong weights, or a transformers version that this "
                    "program does not know); nothing of this shard was written."
                )
        fields = {"layers": layers, "dropped": [self._dropped(launched, sample) for sample in dropped]}
        self._writers.submit(launched.shard, lambda: self._write(launched, arrays, fields, buffer))

    def attempt(self, shard: int, half: Callable[[], Result]) -> Result | None:
        """Run one half of a job; report what goes wrong with this shard and go on, unless the device is broken.

        Raises:
            WrongStates: as :meth:`finish`.
        """
        try:
            return half()
        except WrongStates:
            raise
        except Exception:
            self._tell("failed", shard=shard, text=traceback.format_exc())
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize(self.device)  # raises where the GPU is lost to this process
            return None

    def close(self) -> None:
        """Wait until everything handed over is written."""
        self._writers.close()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _capture_into(
        self, hidden_TLH: Tensor, input_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int
    ) -> None:
        """One forward pass over consecutive samples, padded to ``width``; their real rows go to ``hidden_TLH``."""
        rows = len(lengths)
        ids_RT = np.zeros((rows, width), np.int64)
        real_RT = np.arange(width) < lengths[:, None]
        first, last = int(starts[0]), int(starts[-1] + lengths[-1])
        ids_RT[real_RT] = input_ids[first:last]
        captured = self.target.capture(torch.from_numpy(ids_RT)).flatten(0, 1)
        if real_RT.all():
            hidden_TLH[first:last].copy_(captured)
        else:
            places = torch.from_numpy(np.flatnonzero(real_RT.ravel())).to(captured.device)
            hidden_TLH[first:last].copy_(captured.index_select(0, places))

    def _run_alone(self, launched: LaunchedShard, sample: int) -> None:
        part = slice(sample, sample + 1)
        length = int(launched.lengths[sample])
        self._capture_into(
            launched.hidden_TLH, launched.input_ids, launched.starts[part], launched.lengths[part], length
        )
        launched.rerun.append(sample)
        launched.padded_tokens += length
        launched.passes += 1

    def _not_finite(self, launched: LaunchedShard, among: range | list[int]) -> list[int]:
        """Which of these samples hold a NaN or an infinity in any layer, as stored (bf16)."""
        first = int(launched.starts[among[0]])
        last = int(launched.starts[among[-1]] + launched.lengths[among[-1]])
        # The largest magnitude of a token is NaN or infinite exactly when one of its values is.
        finite_T = launched.hidden_TLH[first:last].abs().amax((1, 2)).isfinite().cpu().numpy()
        if finite_T.all():
            return []
        offsets = launched.starts[among[0] : among[-1] + 1] - first
        return (np.flatnonzero(~np.logical_and.reduceat(finite_T, offsets)) + among[0]).tolist()

    def _dropped(self, launched: LaunchedShard, sample: int) -> dict[str, Any]:
        index = launched.samples[sample]
        samples = self.cache.samples
        return {"sample": index, "row": int(samples.row[index]), "id": samples.sample_id(index), "reason": NOT_FINITE}

    def _write(
        self, launched: LaunchedShard, arrays: dict[str, np.ndarray], fields: dict[str, Any], buffer: HostBuffer
    ) -> None:
        finished_at = time.time()
        run = {
            **self._about,
            "started_at": launched.started_at,
            "finished_at": finished_at,
            "padded_tokens": launched.padded_tokens,
            "padding_waste": launched.padded_tokens / launched.tokens - 1,
            "passes": launched.passes,
            "run_alone": len(launched.rerun),
        }
        try:
            receipt = self.cache.write_shard(launched.shard, arrays, {**fields, "run": run})
        finally:
            self._pool.give_back(buffer)
        self._tell(
            "done",
            shard=launched.shard,
            tokens=receipt.tokens,
            bytes=receipt.bytes,
            dropped=[item.model_dump() for item in receipt.dropped],
        )

    def _write_failed(self, shard: int, error: BaseException) -> None:
        text = explain_disk(error)
        if text is not None:
            self._tell("fatal", text=text)
        else:
            self._tell("failed", shard=shard, text="".join(traceback.format_exception(error)))


def largest_pass(cache: Cache, batch_tokens: int) -> int:
    """Padded tokens that no pass over this cache exceeds: a sample longer than ``batch_tokens`` is one by itself."""
    return max(batch_tokens, int(padded_length(int(cache.samples.length.max()))))


def extract_shard(cache: Cache, target: Target, shard: int, batch_tokens: int = 16384) -> None:
    """Extract one shard in this process; for tests and benchmarks.

    Raises:
        DFlashOfflineError: it failed; the message holds the traceback.
    """
    problems: list[str] = []

    def tell(kind: str, **fields: Any) -> None:
        if kind in ("failed", "fatal"):
            problems.append(fields["text"])

    runner = ShardRunner(cache, target, batch_tokens, tell)
    launched = runner.attempt(shard, lambda: runner.launch(shard))
    if launched is not None:
        runner.attempt(shard, lambda: runner.finish(launched))
    runner.close()
    if problems:
        raise DFlashOfflineError(f"shard {shard} failed:\n{problems[0]}")
