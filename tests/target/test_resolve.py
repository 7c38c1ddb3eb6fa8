"""Targets are found without loading them, identified by content, and refused with a reason."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from dflash_offline.config import TargetConfig
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.target import load_target, resolve_target
from tests.tiny_models import FAMILIES, TOKENIZER_FOLDER, tiny_llama, tiny_qwen3, tiny_qwen3_5


def resolved(folder, **options):
    return resolve_target(TargetConfig(model=str(folder), **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_is_the_target(tiny, family):
    target = resolved(tiny(family))
    assert (target.hidden_size, target.vocab_size) == (64, 512)
    assert target.num_layers == (6 if family.startswith("gemma3") else 4)
    assert target.nested == family.endswith("nested")
    assert target.tied == (family in ("llama", "qwen3-tied", "gemma3", "gemma3-nested"))


def test_a_tied_head_written_only_on_the_shell_counts(tmp_path):
    folder = tiny_qwen3_5(tmp_path, tied=True)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].pop("tie_word_embeddings", None)
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert resolved(folder).tied


def test_identity_is_the_content_and_not_the_place(tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "llama")
    first, second = resolved(tiny("llama")).identity(), resolved(folder).identity()
    assert first == second
    assert first.weights == {
        "model.safetensors": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    }
    assert first.config_sha256 == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert (first.model, first.revision, first.dtype, first.quantization) == ("llama", None, "bfloat16", None)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert resolved(folder).identity().weights != first.weights
    assert resolved(tiny("llama"), dtype="float32").identity() != first


def test_all_parts_of_split_weights_count_and_none_may_lack(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny("qwen3")).save_pretrained(tmp_path, max_shard_size="200KB")
    parts = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    target = resolved(tmp_path)
    assert len(parts) > 1 and sorted(target.identity().weights) == parts
    (tmp_path / parts[-1]).unlink()
    with pytest.raises(UsageError, match=f"weight file {parts[-1]} is missing"):
        target.identity()


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\x00"])
def test_damaged_files_of_a_target_are_named(tiny, tmp_path, name, content):
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DFlashOfflineError, match="damaged") as caught:
        load_target(TargetConfig(model=str(tmp_path)), layer_ids=[0])
    assert str(tmp_path) in str(caught.value)


def test_pickled_weights_are_never_read(tiny, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"not touched")
    with pytest.raises(UsageError, match=r"pickled .bin weights are never read"):
        resolved(tmp_path).identity()


def test_a_hub_revision_is_pinned_to_its_commit(tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny("llama"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    target = resolved("someone/tiny", revision="v1")
    assert (target.identity().model, target.identity().revision) == ("someone/tiny", commit)
    assert target.identity().weights == resolved(tiny("llama")).identity().weights


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda folder: folder / "absent", "no such folder or file"),
        (lambda folder: folder, "holds no config.json"),
        (lambda folder: _file(folder / "x.bin", b"abc"), "must be a GGUF file"),
        (lambda folder: _file(folder / "config.json", b"{").parent, "config.json could not be read"),
        (lambda folder: _file(folder / "config.json", b'{"model_type": "t5"}').parent, "encoder-decoder"),
        (lambda folder: _file(folder / "config.json", b'{"model_type": "vit"}').parent, "no causal decoder"),
        (lambda folder: "runs/models/absent/there", "no local folder or file of that name"),
        (lambda folder: "tests/absent/there.gguf", "no such file"),
    ],
)
def test_what_is_no_target_is_refused(tmp_path, make, complaint):
    with pytest.raises(UsageError, match=complaint):
        resolved(make(tmp_path))


def _file(path, data):
    path.write_bytes(data)
    return path


def test_code_in_the_folder_is_not_run_unless_asked(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}, "num_hidden_layers": 2})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="trust_remote_code = true"):
        resolved(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_beside_the_model_or_named_in_the_recipe(tmp_path):
    assert len(resolved(tiny_llama(tmp_path / "a", tokenizer=True)).tokenizer()) == 49152
    bare = tiny_llama(tmp_path / "b", vocab_size=49152)
    assert len(resolved(bare, tokenizer=str(TOKENIZER_FOLDER)).tokenizer()) == 49152
    with pytest.raises(UsageError, match=r"target\.tokenizer"):
        resolved(bare).tokenizer()


def test_the_empty_tokenizer_that_transformers_makes_where_no_file_is_is_refused(tmp_path):
    from transformers import AutoTokenizer

    folder = tiny_qwen3(tmp_path / "qwen3")
    assert len(AutoTokenizer.from_pretrained(folder)) == 1
    with pytest.raises(UsageError, match=r"has 1 token for the 512 rows .*target\.tokenizer"):
        resolved(folder).tokenizer()


def test_a_tokenizer_of_a_smaller_model_is_refused(tmp_path):
    folder = tiny_llama(tmp_path, vocab_size=131072)
    with pytest.raises(UsageError, match=r"has 49152 tokens for the 131072 rows"):
        resolved(folder, tokenizer=str(TOKENIZER_FOLDER)).tokenizer()
    padded = tiny_llama(tmp_path / "padded", vocab_size=50304)
    assert len(resolved(padded, tokenizer=str(TOKENIZER_FOLDER)).tokenizer()) == 49152


def test_a_tokenizer_with_ids_past_the_embedding_is_refused(tiny):
    with pytest.raises(UsageError, match=r"id 49151, but the embedding has 512 rows \(ids 0 to 511\)"):
        resolved(tiny("llama"), tokenizer=str(TOKENIZER_FOLDER)).tokenizer()


@pytest.mark.parametrize("token, accepted", [("<image_soft_token>", True), ("<|im_extra|>", False)])
def test_only_placeholders_of_images_and_sound_may_lie_past_the_embedding(tmp_path, token, accepted, smollm2_tokenizer):
    import copy

    folder = tiny_llama(tmp_path, tokenizer=True)
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    tokenizer.save_pretrained(folder)
    if accepted:
        assert len(resolved(folder).tokenizer()) == 49153
    else:
        with pytest.raises(UsageError, match="disagrees with the target"):
            resolved(folder).tokenizer()
