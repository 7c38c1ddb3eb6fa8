"""A reader of the cache written from schemas/FORMAT.md alone, with zarr and numpy only (and pyarrow for Parquet)."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zarr


def sealed(data: bytes) -> dict:
    """Content of a JSON file whose ``self_sha256`` is right."""
    content = json.loads(data)
    digest = content["self_sha256"]
    if hashlib.sha256(data.replace(digest.encode(), b"0" * 64)).hexdigest() != digest:
        raise ValueError("self_sha256 is wrong")
    return content


class FormatReader:
    """Reads shards as float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = sealed((folder / "manifest.json").read_bytes())
        self.layout = self.manifest["layout"]
        self.arrays = zarr.open_group(folder / "arrays.zarr", mode="r")
        self.table = pq.read_table(folder / "samples.parquet")

    def receipts(self) -> dict[int, dict]:
        """Valid receipts by shard."""
        texts = {}
        for pack in self.folder.glob("receipts/pack-*.parquet"):
            if hashlib.sha256(pack.read_bytes()).hexdigest() != pack.stem.removeprefix("pack-"):
                continue
            table = pq.read_table(pack)
            texts.update(zip(table["shard"].to_pylist(), table["receipt"].to_pylist(), strict=True))
        for file in self.folder.glob("receipts/*.json"):
            if re.fullmatch(r"\d+", file.stem):
                texts[int(file.stem)] = file.read_bytes()
        found = {}
        for shard, text in texts.items():
            receipt = sealed(text)
            if receipt["shard"] == shard and receipt["plan_sha256"] == self.manifest["identity"]["plan_sha256"]:
                found[shard] = receipt
        return found

    def sample(self, index: int) -> dict:
        """One sample: its columns, tokens, mask and hidden states [length, L, H] as float32."""
        row = {name: self.table[name][index].as_py() for name in self.table.column_names}
        rows = slice(row["start"], row["start"] + row["length"])
        return row | {
            "input_ids": self.arrays["input_ids"][rows],
            "loss_mask": self.arrays["loss_mask"][rows],
            "hidden": self.hidden(rows),
        }

    def hidden(self, rows: slice) -> np.ndarray:
        """Hidden states of token rows as float32."""
        encoding = self.manifest["identity"]["encoding"]
        if encoding["name"] == "bf16":
            planes = self.arrays["hidden"][rows].astype(np.uint32)
            return ((planes[:, :, 0] * 256 + planes[:, :, 1]) << 16).view(np.float32)
        codes, scale_bits = self.arrays["codes"][rows], self.arrays["scales"][rows]
        tokens, layers, channels = codes.shape
        blocks = codes.reshape(tokens, layers, channels // 64, 64)
        scales = (scale_bits.astype(np.uint32) << 16).view(np.float32)
        scales = np.where((blocks == -128).any(-1), np.float32(np.nan), scales)
        hadamard = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)], np.float32)
        values = np.einsum("ij,tlbj->tlbi", hadamard, blocks.astype(np.float32))
        values *= (scales / np.float32(8))[..., None]
        signs = np.array([self._sign(encoding["params"]["seed"], channel) for channel in range(channels)], np.float32)
        return _round_to_bfloat16(values.reshape(codes.shape) * signs)

    @staticmethod
    def _sign(seed: int, channel: int) -> int:
        whole = 2**64 - 1
        z = (seed + (channel + 1) * 0x9E3779B97F4A7C15) & whole
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & whole
        r = z ^ (z >> 31)
        return -1 if r >> 63 else 1


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(values), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))
