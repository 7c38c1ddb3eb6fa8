"""A drafter folder to start training from: the target's own layers in place of random ones.

    python tests/bench/smollm2_init.py --target SmolLM2-135M-Instruct.Q4_1.gguf --out runs/init

SmolLM2's drafter has the shape of its target's layers, so draft layer i may start as target layer ``--layers[i]``:
attention and MLP projections and both norms. ``norm`` starts as the target's final norm, which the frozen head expects.
``fc`` starts as the last kept layer's state plus noise, and ``hidden_norm`` as the mean of the layers' input norms, so
that context keys and values begin near what those layers saw in the target. The query and key norms, which the target
lacks, start at one.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import torch
from smollm2_variants import merge

from dflash_offline.config import TargetConfig, TrainRecipe, validate_recipe
from dflash_offline.drafter.model import DFlashDrafter
from dflash_offline.drafter.shape import shape_from_target
from dflash_offline.export import exported_config, write_drafter_folder
from dflash_offline.target import load_target

RECIPE = Path(__file__).parent / "smollm2_plain.toml"


@torch.no_grad()
def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--tokenizer", default="tests/data/smollm2_tokenizer")
    parser.add_argument("--layers", default="25,26,27,28,29", help="target layers copied, one for each draft layer")
    parser.add_argument("--layer-ids", default="1,8,14,20,27", help="target layers that the drafter reads")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    copied = [int(part) for part in options.layers.split(",")]
    settings = TargetConfig(model=options.target, tokenizer=options.tokenizer, dtype="float32")
    target = load_target(settings, stop_early=False)
    recipe = merge(tomllib.loads(RECIPE.read_text()), {"drafter.num_layers": len(copied)})
    layer_ids = [int(part) for part in options.layer_ids.split(",")]
    config = target.config.to_dict()
    shape = shape_from_target(
        validate_recipe(recipe, TrainRecipe).drafter, config, layer_ids, recipe["drafter"]["mask_token_id"]
    )
    drafter = DFlashDrafter(shape)
    weights = drafter.state_dict()
    norms = []
    for i, layer in enumerate(copied):
        source = target.text_model.layers[layer].state_dict()
        norms.append(source["input_layernorm.weight"])
        for name, tensor in source.items():
            if weights[f"layers.{i}.{name}"].shape != tensor.shape:
                raise SystemExit(f"layers.{i}.{name}: the drafter's shape is not the target's")
            weights[f"layers.{i}.{name}"].copy_(tensor)
    weights["norm.weight"].copy_(target.text_model.norm.weight)
    weights["hidden_norm.weight"].copy_(torch.stack(norms).mean(0))
    hidden = shape.hidden_size
    weights["fc.weight"][:, -hidden:] += torch.eye(hidden)
    heads_info = target.heads_info()
    provenance = {"format": "dflash-offline drafter", "step": 0, "init": {"target_layers": copied}}
    write_drafter_folder(options.out, exported_config(shape, "float32", heads_info), dict(weights), provenance)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
