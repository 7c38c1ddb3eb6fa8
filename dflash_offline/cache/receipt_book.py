"""The receipts of a cache on disk: loose files as they come, folded into packs as they grow many.

A million conversations make a hundred thousand receipts, which is slow to list, above all on a network file system, so
they are folded into Parquet packs named by their own sha256. A pack holds the very bytes of each receipt; what status
and resuming need of all of them is read from a few columns, without parsing any.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from dflash_offline.cache.files import (
    DamagedFile,
    canonical_json,
    fsync_dir,
    with_self_sha256,
    write_atomic,
)
from dflash_offline.cache.receipt_pack import SUMMARY, Pack, pack_paths, summary_row, write_pack
from dflash_offline.cache.receipts import Receipt, parse_receipt, receipt_name

logger = logging.getLogger(__name__)

RECEIPTS = "receipts"
FOLD_AT = 1000
MOST_PACKS = 32
_READ_BYTES = 1 << 16
_LOOSE = re.compile(r"\d{6}\.json|[1-9]\d{6,}\.json")


class ReceiptBook:
    """The receipts of a cache, loose and folded.

    Reading works beside a writer that commits and folds: names of packs are their content, and what disappears between
    listing and reading has moved to a pack that is listed anew.

    Args:
        cache: the cache's folder.
        plan_sha256: receipts of any other plan are not valid.
    """

    def __init__(self, cache: Path, plan_sha256: str) -> None:
        self.folder = cache / RECEIPTS
        self.plan_sha256 = plan_sha256
        self._open: dict[Path, Pack] = {}

    def write(self, receipt: Receipt) -> Receipt:
        """Seal a receipt and write it; from then on its shard exists."""
        sealed = with_self_sha256(receipt.model_dump())
        write_atomic(self.folder / receipt_name(receipt.shard), canonical_json(sealed))
        return receipt.model_copy(update={"self_sha256": sealed["self_sha256"]})

    def loose(self) -> dict[int, Path]:
        """Receipt files by shard, in order, valid or not."""
        return {shard: self.folder / receipt_name(shard) for shard in self._loose_shards()}

    def _loose_shards(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        shards = (int(name.removesuffix(".json")) for name in names if _LOOSE.fullmatch(name))
        return sorted(shards)

    def _read_loose(self, shard: int) -> bytes | None:
        """A loose receipt's bytes; None where it was folded meanwhile. Plain system calls: there are many of them.

        Raises:
            DamagedFile: the file cannot be read.
        """
        path = f"{self.folder}/{receipt_name(shard)}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
        try:
            data = os.read(descriptor, _READ_BYTES)
            while len(data) % _READ_BYTES == 0 and (more := os.read(descriptor, _READ_BYTES)):
                data += more
            return data
        finally:
            os.close(descriptor)

    def packs(self) -> list[Path]:
        """Pack files, valid or not."""
        return pack_paths(self.folder)

    def pack(self, path: Path) -> Pack:
        """A pack, checked against the sha256 in its name once and kept (compressed, some 300 bytes a receipt).

        Raises:
            DamagedFile: it does not match.
            FileNotFoundError: it was merged into another.
        """
        if path not in self._open:
            self._open[path] = Pack(path)
        return self._open[path]

    def each_pack(self) -> Iterator[tuple[Path, Pack | DamagedFile]]:
        """Every pack, or why it cannot be read; starts over where a writer merges packs meanwhile."""
        done: set[Path] = set()
        again = True
        while again:
            again = False
            for path in self.packs():
                if path in done:
                    continue
                try:
                    pack: Pack | DamagedFile = self.pack(path)
                except FileNotFoundError:
                    again = True
                    continue
                except DamagedFile as error:
                    pack = error
                done.add(path)
                yield path, pack

    def raw(self) -> Iterator[tuple[int, bytes | DamagedFile, Path]]:
        """Every receipt once as (shard, its bytes or why there are none, file); a loose one hides a folded one.

        A pack that cannot be read comes as shard -1.
        """
        seen: set[int] = set()
        for shard in self._loose_shards():
            try:
                data: bytes | DamagedFile | None = self._read_loose(shard)
            except DamagedFile as error:
                data = error
            if data is not None:
                seen.add(shard)
                yield shard, data, self.folder / receipt_name(shard)
        for path, pack in self.each_pack():
            if isinstance(pack, DamagedFile):
                yield -1, pack, path
                continue
            for shard, data in pack.receipts():
                if shard not in seen:
                    seen.add(shard)
                    yield shard, data, path

    def contents(self) -> Iterator[dict[str, Any]]:
        """Every valid receipt as a dictionary; one that is not valid is reported by a warning and left out."""
        for shard, data, path in self.raw():
            try:
                if isinstance(data, DamagedFile):
                    raise data
                yield parse_receipt(data, shard, self.plan_sha256, str(path))
            except DamagedFile as error:
                logger.warning("%s; its shards count as not extracted", error)

    def all(self) -> dict[int, Receipt]:
        """Every valid receipt by shard."""
        return {content["shard"]: Receipt.model_validate(content) for content in self.contents()}

    def get(self, shard: int) -> Receipt:
        """The valid receipt of one shard.

        Raises:
            DamagedFile: there is none.
        """
        path = self.folder / receipt_name(shard)
        for _ in range(2):
            if (data := self._read_loose(shard)) is not None:
                return _as_receipt(parse_receipt(data, shard, self.plan_sha256, str(path)), path)
            for pack_path, pack in self.each_pack():
                if not isinstance(pack, DamagedFile) and (data := pack.receipt(shard)) is not None:
                    return _as_receipt(parse_receipt(data, shard, self.plan_sha256, str(pack_path)), pack_path)
        raise DamagedFile(f"shard {shard} has no receipt: it was not extracted, or was damaged and queued again")

    def summary(self) -> pa.Table:
        """Columns of ``SUMMARY`` for every valid receipt, without parsing the folded ones."""
        columns: list[list[Any]] = [[] for _ in SUMMARY.names]  # rather than rows: 134,000 dictionaries keep gc busy
        for shard in self._loose_shards():
            try:
                if (data := self._read_loose(shard)) is not None:
                    what = f"the receipt of shard {shard}"
                    row = summary_row(parse_receipt(data, shard, self.plan_sha256, what))
                    for column, value in zip(columns, row, strict=True):
                        column.append(value)
            except DamagedFile as error:
                logger.warning("%s; its shard counts as not extracted", error)
        tables = [pa.table(columns, schema=SUMMARY)]
        seen = np.array(columns[0], np.int32)
        for _, pack in self.each_pack():
            if isinstance(pack, DamagedFile):
                logger.warning("%s; its shards count as not extracted", pack)
                continue
            table = pack.file.read(columns=[*SUMMARY.names, "plan_sha256"])
            shards = table["shard"].to_numpy()
            ours = pc.equal(table["plan_sha256"], self.plan_sha256)
            new = pc.and_(ours, pa.array(~np.isin(shards, seen)))
            tables.append(table.filter(new).select(SUMMARY.names).cast(SUMMARY))
            seen = np.concatenate((seen, shards))
        return pa.concat_tables(tables)

    def fold(self, at: int = FOLD_AT) -> int:
        """Move loose receipts into a pack once there are ``at`` of them; returns how many were moved.

        The pack is whole before the first loose file goes, so a crash in between leaves both, which reads the same.
        Only the holder of the cache's lock may call this.
        """
        loose = self.loose()
        if not loose or len(loose) < at:
            return 0
        kept: dict[int, bytes] = {}
        for shard, path in loose.items():
            data = path.read_bytes()
            try:
                parse_receipt(data, shard, self.plan_sha256, str(path))
            except DamagedFile:
                continue
            kept[shard] = data
        packs = [path for path, pack in self.each_pack() if isinstance(pack, Pack)]
        merge = packs if len(packs) >= MOST_PACKS else []
        older = {shard: data for path in merge for shard, data in self.pack(path).receipts()}
        written = write_pack(self.folder, {**older, **kept})
        for shard in kept:
            loose[shard].unlink()
        for path in merge:
            if path != written:
                path.unlink()
        fsync_dir(self.folder)
        return len(kept)

    def remove(self, shards: set[int]) -> None:
        """Take away receipts, so that their shards are extracted again. Only the holder of the lock may call this."""
        for path, pack in list(self.each_pack()):
            if isinstance(pack, DamagedFile):
                continue
            receipts = dict(pack.receipts())
            if shards.isdisjoint(receipts):
                continue
            kept = write_pack(self.folder, {shard: data for shard, data in receipts.items() if shard not in shards})
            if kept != path:
                path.unlink()
        for shard in shards:
            (self.folder / receipt_name(shard)).unlink(missing_ok=True)
        fsync_dir(self.folder)


def _as_receipt(content: dict[str, Any], path: Path) -> Receipt:
    try:
        return Receipt.model_validate(content)
    except ValidationError as error:
        raise DamagedFile(f"{path} does not have the form of a receipt: {error}") from None
