"""Files and datasets → chunks of raw rows, numbered as they stand in the source.

The reading process only cuts: lines stay bytes and tables stay Arrow, so that parsing happens in the tokenising
processes. One reader cuts 370 MB/s of plain JSONL; a tokenising core takes about 1 MB/s. JSON arrays are the exception:
they are parsed whole and need the memory for it; prefer JSONL above a gigabyte.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_offline.config import DataConfig
from dflash_offline.conversations.chunks import Chunk
from dflash_offline.errors import DFlashOfflineError, UsageError

CHUNK_ROWS = 256
_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DFlashOfflineError(f"{path}: not a whole gzip file ({error}); fetch or write it again") from None
    except OSError as error:
        raise DFlashOfflineError(f"{path}: cannot be read ({error})") from None


class Source:
    """One file or dataset: counted, fingerprinted and cut into chunks."""

    name: str

    def count(self) -> int:
        """Number of rows."""
        raise NotImplementedError

    def content_sha256(self) -> str:
        """Fingerprint of the content, the same wherever the file lies."""
        raise NotImplementedError

    def chunks(self, wanted: range) -> Iterator[Chunk]:
        """The rows whose numbers are in ``wanted`` (step at least 1; it may end past the source), from 0, in order."""
        raise NotImplementedError


class LinesSource(Source):
    """JSONL, plain or gzipped; blank lines are no rows."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)
        self._count: int | None = None

    def count(self) -> int:
        if self._count is None:
            self._count = sum(1 for line in _lines(self.path) if not line.isspace())
        return self._count

    def content_sha256(self) -> str:
        return file_sha256(self.path)

    def chunks(self, wanted: range) -> Iterator[Chunk]:
        numbers: list[int] = []
        lines: list[tuple[int, bytes]] = []
        row = -1
        for line_number, line in enumerate(_lines(self.path), 1):
            if line.isspace():
                continue
            row += 1
            if row >= wanted.stop:
                break
            if row not in wanted:
                continue
            numbers.append(row)
            lines.append((line_number, line))
            if len(numbers) == CHUNK_ROWS:
                yield Chunk(self.name, numbers, lines=lines)
                numbers, lines = [], []
        if numbers:
            yield Chunk(self.name, numbers, lines=lines)


class ArraySource(Source):
    """A ``.json`` file that holds one list of rows."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)
        self._rows: list[Any] | None = None

    def _load(self) -> list[Any]:
        if self._rows is None:
            data = b"".join(_lines(self.path))
            try:
                self._rows = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
            except (ValueError, RecursionError) as error:
                where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
                raise DFlashOfflineError(f"{self.name}{where}: not valid JSON ({error})") from None
        return self._rows

    def count(self) -> int:
        return len(self._load())

    def content_sha256(self) -> str:
        return file_sha256(self.path)

    def chunks(self, wanted: range) -> Iterator[Chunk]:
        rows = self._load()
        wanted = wanted[: len(range(wanted.start, min(wanted.stop, len(rows)), wanted.step))]
        for start in range(0, len(wanted), CHUNK_ROWS):
            numbers = list(wanted[start : start + CHUNK_ROWS])
            yield Chunk(self.name, numbers, objects=[rows[number] for number in numbers])


class ParquetSource(Source):
    """A Parquet file, read one batch at a time."""

    def __init__(self, path: Path):
        import pyarrow.parquet as pq

        self.path, self.name = path, str(path)
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DFlashOfflineError(f"{self.name}: not a readable Parquet file ({error})") from None

    def count(self) -> int:
        return self._file.metadata.num_rows

    def content_sha256(self) -> str:
        return file_sha256(self.path)

    def chunks(self, wanted: range) -> Iterator[Chunk]:
        first = 0
        try:
            for batch in self._file.iter_batches(batch_size=CHUNK_ROWS):
                if first >= wanted.stop:
                    break
                yield from _table_chunk(self.name, pa.Table.from_batches([batch]), first, wanted)
                first += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise DFlashOfflineError(f"{self.name}: damaged after row {first} ({error})") from None


class DatasetSource(Source):
    """A ``datasets.Dataset``: saved to disk, in a local folder, or from the hub."""

    def __init__(self, name: str, dataset: Any, sha256: Callable[[], str]):
        self.name, self._sha256 = name, sha256
        self._dataset = dataset.with_format("arrow")

    def count(self) -> int:
        return len(self._dataset)

    def content_sha256(self) -> str:
        return self._sha256()

    def chunks(self, wanted: range) -> Iterator[Chunk]:
        start = wanted.start // CHUNK_ROWS * CHUNK_ROWS
        for first in range(start, min(wanted.stop, len(self._dataset)), CHUNK_ROWS):
            yield from _table_chunk(self.name, self._dataset[first : first + CHUNK_ROWS], first, wanted)


def _table_chunk(name: str, table: pa.Table, first: int, wanted: range) -> Iterator[Chunk]:
    numbers = [number for number in range(first, first + table.num_rows) if number in wanted]
    if not numbers:
        return
    if len(numbers) < table.num_rows:
        table = table.take([number - first for number in numbers])
    yield Chunk.from_table(name, numbers, table)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_sources(data: DataConfig) -> list[Source]:
    """The sources a recipe names, in its order.

    Raises:
        UsageError: a name is neither a file, a folder nor a dataset id.
        DFlashOfflineError: a file or dataset cannot be opened.
    """
    names = [data.source] if isinstance(data.source, str) else data.source
    if not names:
        raise UsageError("data.source is an empty list: name at least one file or dataset")
    return [source for name in names for source in _open(name, data)]


def _open(name: str, data: DataConfig) -> Iterable[Source]:
    path = Path(name).expanduser()
    if path.is_file():
        return [_open_file(path)]
    if path.is_dir():
        return [_open_folder(path, data)]
    if glob.has_magic(name) and (found := sorted(glob.glob(str(path), recursive=True))):
        return [_open_file(Path(item)) for item in found]
    if glob.has_magic(name) or name.endswith(_SUFFIXES) or not _HUB_ID.fullmatch(name):
        raise UsageError(f"data.source {name!r}: no such file or folder, and not the form of a hub dataset id")
    return [_load_dataset(name, data, local=None)]


def _open_file(path: Path) -> Source:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return ParquetSource(path)
    if not name.endswith(_SUFFIXES):
        raise UsageError(f"data.source {str(path)!r}: unknown kind of file; known are {', '.join(_SUFFIXES)}")
    if ".json" in Path(name.removesuffix(".gz")).suffixes and _first_byte(path) == b"[":
        return ArraySource(path)
    return LinesSource(path)


def _first_byte(path: Path) -> bytes:
    """First byte of the content that is no space."""
    for line in _lines(path):
        if start := line.removeprefix(b"\xef\xbb\xbf").lstrip():
            return start[:1]
    return b""


def _open_folder(path: Path, data: DataConfig) -> Source:
    if not ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _load_dataset(str(path), data, local=path)
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except Exception as error:
        raise DFlashOfflineError(f"{path}: not a whole save_to_disk folder ({error})") from error
    if isinstance(dataset, DatasetDict):
        if data.split not in dataset:
            raise UsageError(f"data.split {data.split!r}: {path} holds the splits {sorted(dataset)}")
        dataset, path = dataset[data.split], path / data.split
    return DatasetSource(str(path), dataset, lambda: _files_sha256(path.glob("*.arrow")))


def _load_dataset(name: str, data: DataConfig, local: Path | None) -> Source:
    from datasets import Dataset, load_dataset

    try:
        dataset = load_dataset(name, data.subset, split=data.split, revision=data.revision)
    except Exception as error:  # the library and the network raise anything
        raise DFlashOfflineError(
            f"data.source {name!r}: cannot be loaded as a dataset (subset {data.subset!r}, split {data.split!r}, "
            f"revision {data.revision!r}): {type(error).__name__}: {error}"
        ) from error
    assert isinstance(dataset, Dataset)

    def sha256() -> str:
        if local is not None:
            files = [p for p in local.rglob("*") if p.is_file() and not p.name.startswith(".")]
            return hash_texts([_files_sha256(files), str(data.subset), data.split])
        commits = {c for url in dataset.info.download_checksums or {} for c in re.findall(r"@([0-9a-f]{40})", str(url))}
        identity = sorted(commits) or [str(dataset._fingerprint)]
        return hash_texts([name, str(data.subset), data.split, *identity])

    return DatasetSource(name, dataset, sha256)


def _files_sha256(paths: Iterable[Path]) -> str:
    return hash_texts([file_sha256(path) for path in sorted(paths)])


def hash_texts(texts: Iterable[str]) -> str:
    """Hex sha256 of a list of strings, boundaries included."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def parse_slice(text: str | None) -> slice:
    """The ``data.rows`` setting as a slice.

    Raises:
        UsageError: not of the form start:stop or start:stop:step with a positive step.
    """
    if text is None:
        return slice(None)
    parts = text.strip().strip("[]").split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[2] is not None and numbers[2] < 1):
        raise UsageError(
            f"data.rows {text!r}: write it as a Python slice with a positive step, e.g. '0:1000' or ':-200'"
        )
    return slice(*numbers)


def selected_rows(rows: slice, total: int) -> range:
    """Row numbers that a slice selects of ``total`` rows."""
    return range(*rows.indices(total))


def iterate_chunks(sources: list[Source], wanted: range) -> Iterator[Chunk]:
    """Chunks of the wanted rows of all sources, numbered over their concatenation."""
    first = 0
    for source in sources:
        # The first wanted number at or after `first`, in this source's own numbering; sources stop at their own end.
        skip = max(0, -(-(first - wanted.start) // wanted.step))
        local = range(wanted.start + skip * wanted.step - first, wanted.stop - first, wanted.step)
        for chunk in source.chunks(local) if len(local) else ():
            yield Chunk(chunk.origin, [n + first for n in chunk.numbers], chunk.lines, chunk.table, chunk.objects)
        if source is not sources[-1]:
            first += source.count()
