"""``state.json``: what extraction ended with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

STATE = "state.json"


class SetAside(BaseModel):
    """A shard that failed too often."""

    model_config = ConfigDict(extra="forbid")

    shard: int
    error: str
    attempts: int = 1


class State(BaseModel):
    """Content of ``state.json``: what extraction ended with."""

    model_config = ConfigDict(extra="forbid")

    finished: bool = False
    set_aside: list[SetAside] = Field(default_factory=list)
    dropped: int = Field(0, description="samples dropped because their states were not finite")
    self_sha256: str = ""
