"""Conversion of GGUF files, on tiny files written here."""

import gguf as gguf_library
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from eval import gguf
from eval.models import ModelError, ModelSpec, load_model

WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN = 32, 2, 4, 2, 64
HEAD = WIDTH // HEADS
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
MERGES = ["1 2", "12 3", "Ġ Ġ"]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "ĠĠ", *SPECIAL]
TOKENS += ["whole"]  # no merge leads to it


def write_gguf(path, pre, *, adds_bos=None, tied=True, seed=0):
    """A random Llama in float32; returns its tensors by GGUF name."""
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    control, normal = gguf_library.TokenType.CONTROL, gguf_library.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<|begin_of_text|>"))
    writer.add_eos_token_id(TOKENS.index("<|eot_id|>"))
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    if not tied:
        shapes["output"] = (len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        block = {
            "attn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (KV_HEADS * HEAD, WIDTH),
            "attn_v": (KV_HEADS * HEAD, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_norm": (WIDTH,),
            "ffn_gate": (HIDDEN, WIDTH),
            "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    generator = np.random.default_rng(seed)
    tensors = {f"{name}.weight": generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FFD_CACHE", str(tmp_path / "cache"))


def load(path):
    return load_model(ModelSpec(path=str(path), device="cpu"))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_kept_exactly(tmp_path, tied):
    path = tmp_path / "tiny.gguf"
    written = write_gguf(path, "smollm", tied=tied)
    loaded = load(path)
    state = loaded.model.state_dict()
    head = written["token_embd.weight"] if tied else written["output.weight"]
    np.testing.assert_array_equal(state["model.embed_tokens.weight"], written["token_embd.weight"])
    np.testing.assert_array_equal(state["lm_head.weight"], head)
    np.testing.assert_array_equal(state["model.layers.1.mlp.down_proj.weight"], written["blk.1.ffn_down.weight"])
    # GGUF interleaves the two halves of each query and key head for its rotary kernel.
    halves = written["blk.0.attn_k.weight"].reshape(KV_HEADS, HEAD // 2, 2, WIDTH).swapaxes(1, 2)
    np.testing.assert_array_equal(state["model.layers.0.self_attn.k_proj.weight"], halves.reshape(-1, WIDTH))
    assert (loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight) == tied
    assert loaded.context_length == loaded.tokenizer.model_max_length == 256


def test_conversion_happens_once_per_content(tmp_path, capfd):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm")
    folder, digest = gguf.converted(path)
    assert capfd.readouterr().err.count("converting tiny.gguf") == 1
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(path.read_bytes())
    assert gguf.converted(copy) == (folder, digest)
    assert "converting" not in capfd.readouterr().err
    write_gguf(copy, "smollm", seed=1)
    assert gguf.converted(copy)[0] != folder
    assert not list((tmp_path / "cache/staging").iterdir())


def test_a_file_is_parsed_once_however_often_it_is_opened(tmp_path, monkeypatch):
    """It was four times, half of the minute that a vocabulary of 150,000 tokens took to convert."""
    parsed = []
    reader = gguf_library.GGUFReader

    class Counted(reader):
        def __init__(self, path, *arguments):
            parsed.append(path)
            super().__init__(path, *arguments)

    monkeypatch.setattr(gguf_library, "GGUFReader", Counted)
    write_gguf(tmp_path / "m.gguf", "llama-bpe")
    gguf.converted(tmp_path / "m.gguf")
    assert len(parsed) == 1
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(gguf.GGUFError):
        gguf.converted(tmp_path / "bad.gguf")
    assert gguf_library.GGUFReader is Counted


def test_large_models_are_stored_in_half_the_bytes(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    written = write_gguf(path, "smollm")
    monkeypatch.setattr(gguf, "FLOAT32_LIMIT", 1000)
    loaded = load(path)
    assert loaded.dtype == "float32"
    stored = written["token_embd.weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(loaded.model.state_dict()["model.embed_tokens.weight"], stored)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["ĠĠ", "1", "2", "3", "4"]),  # digits apart, white space of its own
        ("qwen2", ["Ġ", "Ġ", "1", "2", "3", "4"]),  # digits apart, the last space left for what follows
        ("llama-bpe", ["Ġ", "Ġ", "123", "4"]),  # digits in threes
    ],
)
def test_text_is_split_by_the_files_rule(tmp_path, pre, expected):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, pre, adds_bos=False)
    assert load(path).tokenizer.tokenize("  1234") == expected


def test_llama3_rules(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama-bpe")
    loaded = load(path)
    bos = TOKENS.index("<|begin_of_text|>")
    assert loaded.bos_token_id == bos  # added unless the file says otherwise
    assert loaded.tokenizer("1").input_ids == [bos, TOKENS.index("1")]
    assert loaded.tokenizer.tokenize("whole") == ["whole"]  # a token as a whole needs no merges
    assert loaded.eos_token_ids == (TOKENS.index("<|end_of_text|>"), TOKENS.index("<|eot_id|>"))


def test_start_token_follows_the_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2")
    loaded = load(path)
    assert loaded.bos_token_id is None
    assert set(loaded.eos_token_ids) == {TOKENS.index(t) for t in ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")}
    assert loaded.tokenizer("<|im_end|>").input_ids == [TOKENS.index("<|im_end|>")]
    write_gguf(path, "qwen2", adds_bos=True)
    assert load(path).tokenizer("1").input_ids == [TOKENS.index("<|begin_of_text|>"), TOKENS.index("1")]


def test_unknown_rule_is_said(tmp_path, capfd):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "gpt-2")
    load(path)
    assert "pre-tokenizer 'gpt-2' is not known here" in capfd.readouterr().err


@pytest.mark.parametrize("kept", [100, 2000, -1000])
def test_cut_off_file(tmp_path, kept):
    path = tmp_path / "cut.gguf"
    write_gguf(path, "smollm")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.path=.*cut\.gguf is damaged or cut off") as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "cache/converted").exists()


def test_full_disk_leaves_no_half_conversion(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the tokenizer fits, the weights do not
    try:
        with pytest.raises(ModelError, match=r"cannot convert tiny\.gguf into .*FFD_CACHE"):
            load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache/staging").iterdir())
    load(path)


def test_other_files_are_not_gguf(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(path)


def test_unsupported_architecture(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf_library.GGUFWriter(path, "unheardof")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"transformers cannot read .*odd\.gguf"):
        load(path)


def test_generation_stops_at_the_files_end_token(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "smollm")
    loaded = load(path)
    assert loaded.eos_token_ids == (TOKENS.index("<|eot_id|>"),)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        loaded.model.lm_head.weight.zero_()  # tied: every logit equal, the first token wins
    assert loaded.model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 7)
