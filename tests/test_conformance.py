"""The drafter agrees with values that SpecForge computed, case by case (tests/data/conformance/README.md).

``DFLASH_CONFORMANCE_DIR`` names a further folder of cases.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_offline.config import LossConfig
from dflash_offline.drafter.blocks import block_labels, block_positions, block_token_ids, embed_tokens
from dflash_offline.drafter.head import FusedHead
from dflash_offline.drafter.losses import LossOutput, drafter_loss, loss_denominator
from dflash_offline.drafter.mask import build_attention_mask, dense_mask
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import FULL, SLIDING, DrafterShape

OWN = Path(__file__).parent / "data" / "conformance"


def case_files() -> list[Path]:
    folders = [OWN]
    if extra := os.environ.get("DFLASH_CONFORMANCE_DIR"):
        folders.append(Path(extra))
        if not Path(extra).is_dir():
            raise FileNotFoundError(f"DFLASH_CONFORMANCE_DIR: {extra} is no folder")
    return [path for folder in folders for path in sorted(folder.rglob("*.json"))]


class Case:
    """One case: SpecForge's inputs, weights and results, and our drafter with those weights."""

    def __init__(self, path: Path) -> None:
        info: dict[str, Any] = json.loads(path.read_text())
        self.results: dict[str, dict[str, float]] = info["results"]
        self.gamma: float = info["gamma"]
        self.tensors = load_file(path.with_suffix(".safetensors"))
        rope = {"rope_theta": info["rope_theta"], "rope_type": "default"}
        taps = info["num_context_features"]
        layer_types = tuple(info["layer_types"])
        self.shape = DrafterShape(
            hidden_size=info["hidden_size"],
            num_layers=info["num_hidden_layers"],
            num_heads=info["num_attention_heads"],
            num_kv_heads=info["num_key_value_heads"],
            head_dim=info["head_dim"],
            intermediate_size=info["intermediate_size"],
            block_size=info["block_size"],
            mask_token_id=info["mask_token_id"],
            target_layer_ids=tuple(range(taps)),
            num_target_layers=taps,
            vocab_size=info["vocab_size"],
            layer_types=layer_types,
            sliding_window=info["sliding_window"] if SLIDING in layer_types else None,
            rope_theta=info["rope_theta"],
            rope_parameters=rope,
            rms_norm_eps=info["rms_norm_eps"],
            max_position_embeddings=4096,
        )
        self.anchors = self.tensors["anchor_positions"]
        self.keep = self.tensors["block_keep_mask"].bool()
        self.starts = torch.zeros_like(self.anchors)
        self.rows, self.context_tokens = self.tensors["input_ids"].shape
        self.ends = torch.full_like(self.anchors, self.context_tokens)
        self.drafter = DFlashDrafter(self.shape, seed=None)
        weights = {k.removeprefix("draft."): v for k, v in self.tensors.items() if k.startswith("draft.")}
        self.drafter.load_state_dict(weights)

    def mask(self, layer_type: str) -> Tensor:
        return dense_mask(
            layer_type,
            self.anchors,
            self.starts,
            self.keep,
            self.context_tokens,
            self.shape.block_size,
            window=self.shape.sliding_window,
        )

    def hidden(self) -> Tensor:
        ids = block_token_ids(self.tensors["input_ids"], self.anchors, self.shape.block_size, self.shape.mask_token_id)
        positions = torch.arange(self.context_tokens).expand(self.rows, -1)
        mask = build_attention_mask(self.shape, self.anchors, self.starts, self.keep, self.context_tokens)
        return self.drafter(
            embed_tokens(self.tensors["embed_tokens.weight"], ids),
            self.tensors["hidden_states"],
            positions,
            block_positions(positions, self.anchors, self.shape.block_size),
            mask,
        )

    def loss(self, config: LossConfig) -> LossOutput:
        labels, valid = block_labels(
            self.tensors["input_ids"],
            self.anchors,
            self.keep,
            self.ends,
            self.tensors["loss_mask"],
            self.shape.block_size,
        )
        head = FusedHead(self.tensors["lm_head.weight"], chunk=16)
        denominator = loss_denominator(valid, config, sequences=self.rows)
        return drafter_loss(self.hidden(), labels, valid, head, config, denominator, count=int(valid.sum()))

    def loss_configs(self) -> dict[str, LossConfig]:
        return {
            "ce": LossConfig(name="ce", decay=False),
            "ce_decay": LossConfig(name="ce", gamma=self.gamma),
            "dpace_alpha0.5_per_sequence": LossConfig(name="d-pace", alpha=0.5, normalize="sequences"),
        }


@pytest.fixture(scope="module", params=case_files(), ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_the_own_cases_are_there() -> None:
    assert {path.stem for path in OWN.glob("*.json")} == {"full_attention", "holes_in_blocks", "sliding_mixed"}


def test_masks_are_equal(case: Case) -> None:
    expected = {FULL: "expected.mask_full", SLIDING: "expected.mask_sliding"}
    present = [layer_type for layer_type, key in expected.items() if key in case.tensors]
    assert set(case.shape.layer_types) <= set(present)
    used = case.keep.repeat_interleave(case.shape.block_size, dim=1)
    for layer_type in present:
        # unused slots see themselves in ours and nothing in SpecForge's
        mask = case.mask(layer_type) & used[:, :, None]
        assert torch.equal(mask, case.tensors[expected[layer_type]].bool()), layer_type


def test_hidden_states_agree(case: Case) -> None:
    with torch.no_grad():
        hidden = case.hidden()
    assert hidden.isfinite().all()
    used = case.keep.repeat_interleave(case.shape.block_size, dim=1)
    difference = (hidden - case.tensors["expected.draft_hidden"])[used].abs().max().item()
    assert difference <= 1e-4


@pytest.mark.parametrize("name", ["ce", "ce_decay", "dpace_alpha0.5_per_sequence"])
def test_losses_accuracy_and_gradients_agree(case: Case, name: str) -> None:
    expected = case.results[name]
    case.drafter.zero_grad()
    output = case.loss(case.loss_configs()[name])
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    assert int(output.valid.sum()) == expected["weighted_positions"]
    assert int(output.correct.sum()) == expected["correct"]
    assert (output.correct.sum() / output.valid.sum()).item() == pytest.approx(expected["accuracy"], rel=1e-5)
    gradients = {key: p.grad for key, p in case.drafter.named_parameters()}
    norms = {
        "grad_norm_fc": gradients["fc.weight"].norm(),
        "grad_norm_k0": gradients["layers.0.self_attn.k_proj.weight"].norm(),
        "grad_norm_total": torch.stack([g.norm() for g in gradients.values()]).norm(),
    }
    for key, norm in norms.items():
        assert norm.item() == pytest.approx(expected[key], rel=1e-3), key
