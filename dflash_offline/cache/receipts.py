"""Receipts: a shard exists when, and only when, a valid receipt says so."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dflash_offline.cache.files import DamagedFile, load_sealed


class Strict(BaseModel):
    """Base of a receipt's parts: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class StoredObject(Strict):
    """One object of the shard."""

    path: str = Field(description="from the cache's folder")
    bytes: int
    sha256: str


class DroppedSample(Strict):
    """A sample whose rows keep the fill value."""

    sample: int = Field(description="index in samples.parquet")
    row: int
    id: str
    reason: str


class LayerStatistics(Strict):
    """One kept layer over the tokens of a shard, as a reader decodes it; errors are relative L2 norms a token."""

    mean: float
    std: float
    abs_max: float
    zero_share: float = Field(description="share of values that are exactly zero")
    norm_spread: float = Field(description="std over mean of the tokens' norms; 0 where every token is alike")
    error_mean: float
    error_worst: float
    error_mean_without_peaks: float = Field(description="without the three strongest channels")
    error_worst_without_peaks: float


class Receipt(Strict):
    """Content of ``receipts/000123.json``."""

    shard: int
    plan_sha256: str
    objects: dict[str, StoredObject]
    tokens: int = Field(description="token rows stored, those of dropped samples among them")
    samples: int = Field(description="samples of the shard, dropped ones among them")
    dropped: list[DroppedSample] = Field(default_factory=list)
    layers: list[LayerStatistics] = Field(default_factory=list)
    run: dict[str, Any] = Field(
        default_factory=dict,
        description="what may differ between runs: started_at, finished_at (unix seconds), worker, device, versions",
    )
    self_sha256: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the shard's objects."""
        return sum(stored.bytes for stored in self.objects.values())


def receipt_name(shard: int) -> str:
    """File name of a shard's receipt."""
    return f"{shard:06d}.json"


def parse_receipt(data: bytes, shard: int, plan_sha256: str, what: str) -> dict[str, Any]:
    """Parse a receipt's bytes and check them against themselves, the shard and the plan.

    Raises:
        DamagedFile: it is not the valid receipt of that shard and plan.
    """
    content = load_sealed(data, what)
    if content.get("shard") != shard or content.get("plan_sha256") != plan_sha256:
        raise DamagedFile(f"{what} belongs to another shard or plan")
    return content
