"""Reading and writing a cache: the one object that the two stages share.

Opening one reads the manifest and the sample index and touches no array. Every read of hidden states first finds the
shard's valid receipt; every inner chunk is checked by its crc32c, and one that is missing where rows were stored is an
error, never fill.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dflash_offline.cache.files import DamagedFile, read_sealed, sha256_file, write_sealed
from dflash_offline.cache.manifest import Manifest, read_manifest
from dflash_offline.cache.receipt_book import FOLD_AT, ReceiptBook
from dflash_offline.cache.receipts import DroppedSample, LayerStatistics, Receipt, StoredObject
from dflash_offline.cache.samples import SAMPLES, Samples, read_samples
from dflash_offline.cache.shards import ShardObject, layer_major, write_object
from dflash_offline.cache.state import STATE, State
from dflash_offline.errors import DFlashOfflineError

if TYPE_CHECKING:
    import torch

    from dflash_offline.cache.encodings.base import Encoding

TARGET = "target"


class DamagedShard(DFlashOfflineError):
    """A shard without a valid receipt, or whose objects do not match it.

    Attributes:
        shard: its number.
    """

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard


class Cache:
    """A cache of hidden states on disk; make one with :meth:`open` or
    :func:`~dflash_offline.cache.create.create_cache`.

    Attributes:
        path: its folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest, threads: int | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.book = ReceiptBook(path, manifest.identity.plan_sha256)
        self._starting = threading.Lock()
        self._started_pool: ThreadPoolExecutor | None = None
        self._threads = threads or min(8, os.cpu_count() or 1)

    @classmethod
    def open(cls, path: Path | str, threads: int | None = None) -> Cache:
        """Open a cache.

        Args:
            path: its folder.
            threads: that compress and decompress; default: one a core, at most 8.

        Raises:
            UsageError: it is not a cache, not finished being prepared, or of another format version.
            DamagedFile: its manifest does not match its checksum.
        """
        return cls(Path(path), read_manifest(Path(path)), threads)

    # What the cache is

    @cached_property
    def samples(self) -> Samples:
        """The sample index, in storage order.

        Raises:
            DamagedFile: ``samples.parquet`` does not match the manifest.
        """
        return read_samples(self.path / SAMPLES, self.manifest.files[SAMPLES])

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding of the hidden states."""
        from dflash_offline.cache.encodings import get_encoding

        return get_encoding(self.manifest.identity.encoding.name, self.manifest.identity.encoding.params)

    @property
    def num_shards(self) -> int:
        """Shards, held-out ones first."""
        return self.manifest.layout.num_shards

    @property
    def shard_tokens(self) -> int:
        """Token rows of a shard."""
        return self.manifest.layout.shard_tokens

    @cached_property
    def _sample_bounds(self) -> np.ndarray:
        return np.searchsorted(self.samples.shard, np.arange(self.num_shards + 1))

    @property
    def _pool(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._started_pool is None:
                self._started_pool = ThreadPoolExecutor(self._threads, thread_name_prefix="cache")
            return self._started_pool

    def close(self) -> None:
        """Stop the cache's threads, if any were started."""
        with self._starting:
            if self._started_pool is not None:
                self._started_pool.shutdown()
                self._started_pool = None

    def shard_samples(self, shard: int) -> range:
        """Indices in :attr:`samples` of a shard's samples."""
        return range(int(self._sample_bounds[shard]), int(self._sample_bounds[shard + 1]))

    def shard_rows(self, shard: int) -> int:
        """Token rows that a shard's samples fill."""
        samples = self.shard_samples(shard)
        return int(self.samples.length[samples.start : samples.stop].sum())

    def shard_tokens_used(self) -> np.ndarray:
        """int64 [num_shards]: token rows that each shard's samples fill."""
        lengths = self.samples.length.astype(np.int64)
        return np.bincount(self.samples.shard, weights=lengths, minlength=self.num_shards).astype(np.int64)

    def is_heldout(self, shard: int) -> bool:
        """Whether a shard holds held-out samples."""
        return shard < self.manifest.layout.num_heldout_shards

    # Tokens and the target

    def read_tokens(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss mask of a shard.

        Returns:
            input_ids uint32 [shard_tokens] and loss_mask uint8 [shard_tokens]; zero past the last sample.

        Raises:
            DamagedShard: they do not match their checksums.
        """
        found = []
        for spec in self.manifest.layout.token_arrays:
            number, place = divmod(shard, spec.object_rows // self.shard_tokens)
            first = place * self.shard_tokens
            out = np.empty(self.shard_tokens, spec.dtype)
            try:
                with ShardObject(self.path / spec.object_path(number), spec) as stored:
                    stored.read(slice(first, first + self.shard_tokens), None, out, None, spec.object_rows)
            except DamagedFile as error:
                raise DamagedShard(shard, f"the tokens of shard {shard} cannot be used: {error}") from error
            found.append(out)
        return found[0], found[1]

    def target_file(self, name: str) -> Path:
        """A file under ``target/``, checked against the manifest.

        Raises:
            DamagedFile: it is missing or does not match.
        """
        path = self.path / TARGET / name
        wanted = self.manifest.files.get(f"{TARGET}/{name}")
        if wanted is None or not path.is_file() or sha256_file(path) != wanted:
            raise DamagedFile(f"{path} is missing or does not match the manifest: prepare the cache again")
        return path

    def heads(self, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """The target's ``embed_tokens.weight``, ``lm_head.weight`` (unless tied) and ``norm.weight`` on ``device``."""
        from safetensors.torch import load_file

        return load_file(self.target_file("heads.safetensors"), device=str(device))

    def heads_info(self) -> dict[str, Any]:
        """What ``heads.json`` says of them: tied, embed_scale, norm_eps, …"""
        return json.loads(self.target_file("heads.json").read_bytes())

    def target_config(self) -> dict[str, Any]:
        """The target's text config."""
        return json.loads(self.target_file("config.json").read_bytes())

    def tokenizer(self) -> Any:
        """The target's tokenizer.

        Raises:
            DamagedFile: a file of it is missing or does not match the manifest.
        """
        from transformers import AutoTokenizer

        for name in self.manifest.files:
            if name.startswith(f"{TARGET}/") and not name.endswith(".safetensors"):
                self.target_file(name.removeprefix(f"{TARGET}/"))
        return AutoTokenizer.from_pretrained(self.path / TARGET)

    # Hidden states

    def write_shard(self, shard: int, arrays: dict[str, np.ndarray], receipt_fields: dict[str, Any]) -> Receipt:
        """Commit a shard: each object by rename, then the receipt. May be called from several threads at once.

        Args:
            shard: its number.
            arrays: every encoded array, [shard_rows(shard), *row_shape].
            receipt_fields: ``layers``, ``dropped`` and ``run`` of the receipt.

        Raises:
            DFlashOfflineError: the disk is full.
            ValueError: an array is missing or has another shape or dtype.
        """
        rows = self.shard_rows(shard)
        specs = self.manifest.layout.hidden_arrays
        if set(arrays) != {spec.name for spec in specs}:
            raise ValueError(f"shard {shard}: arrays {sorted(arrays)} where {[spec.name for spec in specs]} belong")
        for spec in specs:
            have = arrays[spec.name]
            if have.shape != (rows, *spec.row_shape) or have.dtype != spec.dtype:
                want = (rows, *spec.row_shape)
                raise ValueError(f"{spec.name}: {have.dtype}{have.shape} where {spec.dtype}{want} belongs")
        objects = {}
        for spec in specs:
            path = spec.object_path(shard)
            size, digest = write_object(self.path / path, arrays[spec.name], spec, self._pool)
            objects[spec.name] = StoredObject(path=path, bytes=size, sha256=digest)
        receipt = Receipt(
            shard=shard,
            plan_sha256=self.manifest.identity.plan_sha256,
            objects=objects,
            tokens=rows,
            samples=len(self.shard_samples(shard)),
            dropped=[DroppedSample.model_validate(item) for item in receipt_fields.get("dropped", [])],
            layers=[LayerStatistics.model_validate(item) for item in receipt_fields.get("layers", [])],
            run=receipt_fields.get("run", {}),
        )
        return self.book.write(receipt)

    def read_shard_encoded(
        self,
        shard: int,
        layers: Sequence[int] | None = None,
        rows: slice | None = None,
        check: Literal["size", "sha256"] = "size",
        out: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Encoded arrays of a shard, in the memory order of :func:`~dflash_offline.cache.shards.layer_major`.

        Args:
            shard: its number.
            layers: indices into the kept layers; None for all.
            rows: rows within the shard; None for all that its samples fill.
            check: ``size`` compares sizes and the crc32c of every chunk read; ``sha256`` the whole objects as well.
            out: arrays to fill, by name, at least as long as the rows asked for; views of them are returned.

        Raises:
            DamagedShard: it has no valid receipt, or an object does not match it.
        """
        try:
            receipt = self.book.get(shard)
            first, last, _ = (rows or slice(None)).indices(receipt.tokens)
            found = {}
            for spec in self.manifest.layout.hidden_arrays:
                stored = receipt.objects[spec.name]
                shape = spec.row_shape if layers is None else (len(layers), *spec.row_shape[1:])
                if out is None:
                    target = layer_major(last - first, shape, spec.dtype)
                else:
                    target = out[spec.name][: last - first]
                wanted = stored.sha256 if check == "sha256" else None
                with ShardObject(self.path / spec.object_path(shard), spec, stored.bytes, wanted) as opened:
                    opened.read(slice(first, last), layers, target, self._pool, receipt.tokens)
                found[spec.name] = target
            return found
        except DamagedFile as error:
            raise DamagedShard(shard, f"shard {shard} cannot be used: {error}") from error

    def read_hidden(
        self,
        shard: int,
        layers: Sequence[int] | None = None,
        rows: slice | None = None,
        device: str | torch.device = "cpu",
    ) -> torch.Tensor:
        """Hidden states of a shard as bfloat16 [rows, layers, hidden] on ``device``; see :meth:`read_shard_encoded`.

        Rows of dropped samples are NaN.
        """
        arrays = self.read_shard_encoded(shard, layers, rows)
        return self.encoding.decode(self.encoding.to_torch(arrays, device))

    # Receipts and state

    def receipts(self) -> dict[int, Receipt]:
        """Every valid receipt by shard."""
        return self.book.all()

    def receipt(self, shard: int) -> Receipt:
        """The valid receipt of a shard.

        Raises:
            DamagedFile: there is none.
        """
        return self.book.get(shard)

    def finished_shards(self) -> np.ndarray:
        """Shards that have a valid receipt, in order."""
        return np.unique(self.book.summary()["shard"].to_numpy())

    def missing_shards(self) -> list[int]:
        """Shards without a valid receipt, in order: what is left to extract."""
        return np.setdiff1d(np.arange(self.num_shards), self.finished_shards()).tolist()

    def fold_receipts(self, at: int = FOLD_AT) -> int:
        """Fold loose receipts into a pack once there are ``at`` of them. For the holder of the lock only."""
        return self.book.fold(at)

    def state(self) -> State | None:
        """What extraction ended with; None where it has not ended.

        Raises:
            DamagedFile: ``state.json`` does not match its own checksum.
        """
        path = self.path / STATE
        return State.model_validate(read_sealed(path)) if path.exists() else None

    def write_state(self, state: State) -> None:
        """Write ``state.json``. For the holder of the lock only."""
        write_sealed(self.path / STATE, state.model_dump())

    def require_trainable(self, allow_set_aside: bool = False, follow: bool = False) -> State:
        """Refuse a cache that training should not use as it is.

        Args:
            allow_set_aside: train without the shards that extraction gave up on.
            follow: train while extraction goes on.

        Raises:
            DFlashOfflineError: extraction is not finished, or has set shards aside.
        """
        state = self.state() or State()
        aside = {item.shard: item.error for item in state.set_aside}
        missing = [shard for shard in self.missing_shards() if shard not in aside]
        if missing and not follow:
            raise DFlashOfflineError(
                f"the cache {self.path} is not finished: {len(missing)} of {self.num_shards} shards are not extracted "
                f"({_some(missing)}). Run `dflash-offline extract` with its recipe; it resumes."
            )
        if aside and not allow_set_aside:
            first = next(iter(aside.values())).strip().splitlines() or ["no message"]
            raise DFlashOfflineError(
                f"extraction of {self.path} has set aside {len(aside)} of {self.num_shards} shards "
                f"({_some(sorted(aside))}): {first[-1]}. Run `dflash-offline extract` again to retry them, or train "
                "without them with --set training.allow_set_aside=true."
            )
        return state


def _some(shards: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(shard) for shard in shards[:most])
    return f"shard{'s' if len(shards) > 1 else ''} {shown}{', …' if len(shards) > most else ''}"
