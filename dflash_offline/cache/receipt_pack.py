"""A pack of receipts: one Parquet file, named by its own sha256.

It holds the very bytes of each receipt, in order of their shards, and beside them the few columns that status and
resuming need of all of them, so that none has to be parsed for that.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_offline.cache.files import DamagedFile, load_sealed, sha256_bytes, write_atomic

logger = logging.getLogger(__name__)

SUMMARY = pa.schema(
    [
        ("shard", pa.int32()),
        ("tokens", pa.int64()),
        ("samples", pa.int32()),
        ("dropped", pa.int32()),
        ("bytes", pa.int64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("worker", pa.string()),
    ]
)
_ROW_GROUP = 512
_NAME = re.compile(r"pack-([0-9a-f]{64})\.parquet")


def pack_paths(folder: Path) -> list[Path]:
    """Pack files of a folder by name, valid or not."""
    return sorted(path for path in folder.glob("pack-*.parquet") if _NAME.fullmatch(path.name))


class Pack:
    """A pack in memory, as compressed as on disk.

    Args:
        path: its file, whose name holds its sha256.

    Raises:
        DamagedFile: it cannot be read or does not match its name.
        FileNotFoundError: it was merged into another.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
        match = _NAME.fullmatch(path.name)
        if match is None or sha256_bytes(data) != match[1]:
            raise DamagedFile(f"{path} is damaged: it does not match the sha256 in its name")
        self.file = pq.ParquetFile(pa.BufferReader(data))
        self.shards = self.file.read(columns=["shard"])["shard"].to_numpy()

    def receipts(self) -> Iterator[tuple[int, bytes]]:
        """Every receipt's bytes with its shard."""
        for group in range(self.file.num_row_groups):
            table = self.file.read_row_group(group, columns=["shard", "receipt"])
            yield from zip(table["shard"].to_pylist(), table["receipt"].to_pylist(), strict=True)

    def receipt(self, shard: int) -> bytes | None:
        """One receipt's bytes, if it is here."""
        place = int(np.searchsorted(self.shards, shard))
        if place == len(self.shards) or self.shards[place] != shard:
            return None
        table = self.file.read_row_group(place // _ROW_GROUP, columns=["receipt"])
        return table["receipt"][place % _ROW_GROUP].as_py()


def write_pack(folder: Path, receipts: dict[int, bytes]) -> Path | None:
    """Write a pack of these receipts' bytes into a folder; its path, or None where there are none."""
    if not receipts:
        return None
    shards = sorted(receipts)
    parsed = [load_sealed(receipts[shard], f"receipt of shard {shard}") for shard in shards]
    table = pa.table(list(zip(*map(summary_row, parsed), strict=True)), schema=SUMMARY)
    table = table.append_column("plan_sha256", pa.array([content["plan_sha256"] for content in parsed]))
    table = table.append_column("receipt", pa.array([receipts[shard] for shard in shards], pa.binary()))
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", row_group_size=_ROW_GROUP)
    path = folder / f"pack-{sha256_bytes(buffer.getbuffer())}.parquet"
    write_atomic(path, buffer.getbuffer())
    return path


def salvage_pack(path: Path, plan_sha256: str) -> dict[int, bytes]:
    """Those receipts of a damaged pack that are whole, by shard: each carries its own checksum."""
    kept: dict[int, bytes] = {}
    try:
        file = pq.ParquetFile(path)
        groups = range(file.num_row_groups)
    except (OSError, pa.ArrowException) as error:
        logger.warning("%s cannot be read at all (%s): its shards are extracted again", path, error)
        return kept
    for group in groups:
        try:
            receipts = file.read_row_group(group, columns=["receipt"])["receipt"].to_pylist()
        except (OSError, pa.ArrowException):
            continue
        for data in receipts:
            try:
                content = load_sealed(data, "a receipt")
                kept[content["shard"]] = data if content["plan_sha256"] == plan_sha256 else b""
            except (DamagedFile, KeyError, TypeError):
                continue
    return {shard: data for shard, data in kept.items() if data}


def summary_row(content: dict[str, Any]) -> tuple[Any, ...]:
    """Values of ``SUMMARY`` for one receipt."""
    run = content["run"]
    worker = run.get("worker")
    return (
        content["shard"],
        content["tokens"],
        content["samples"],
        len(content["dropped"]),
        sum(stored["bytes"] for stored in content["objects"].values()),
        run.get("started_at"),
        run.get("finished_at"),
        None if worker is None else str(worker),
    )
