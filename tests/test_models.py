"""Model loading: tiny random folders made here, errors, and the embedded model where it is cached."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eval import model_files
from eval.data import sources, store
from eval.models import NAMED_MODELS, ModelError, ModelSpec, describe, load_model, load_tokenizer

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
}


def byte_tokenizer(*special: str, adds_bos: bool) -> PreTrainedTokenizerFast:
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", *special])
    if adds_bos:
        bos = ("<bos>", backend.token_to_id("<bos>"))
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


def save_llama(folder: Path, *special: str, adds_bos: bool = True, **changes: object) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | changes)).save_pretrained(folder)
    byte_tokenizer(*special, adds_bos=adds_bos).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def broken(llama, tmp_path):
    """A copy of the folder for a test to damage."""
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def failure(**spec: object) -> str:
    with pytest.raises(ModelError) as raised:
        load_model(ModelSpec(**spec))
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_folder_loads_ready_for_inference(llama):
    loaded = load_model(ModelSpec(name="tiny", path=str(llama), device="cpu"))
    assert (loaded.name, loaded.family, loaded.context_length) == ("tiny", "llama", 512)
    assert loaded.eos_token_ids == (257, 258)
    assert loaded.bos_token_id == 256
    assert (loaded.dtype, loaded.device) == ("float32", "cpu")
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    ids = torch.tensor([loaded.tokenizer("two words").input_ids])
    torch.testing.assert_close(loaded.model(ids).logits, LlamaForCausalLM.from_pretrained(llama)(ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_the_one_asked(llama, dtype):
    loaded = load_model(ModelSpec(path=str(llama), dtype=dtype, device="cpu"))
    assert loaded.dtype == dtype
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}


def test_description_needs_no_weights(broken, monkeypatch):
    whole = describe(ModelSpec(path=str(broken)))
    (broken / "model.safetensors").write_bytes(b"not weights")
    described = describe(ModelSpec(path=str(broken)))
    assert described.eos_token_ids == whole.eos_token_ids
    assert load_tokenizer(ModelSpec(path=str(broken)))("ab").input_ids == whole.tokenizer("ab").input_ids


def test_llama3_is_told_by_its_chat_tokens_and_bos_by_the_tokenizer(tmp_path):
    folder = save_llama(tmp_path, "<|start_header_id|>", adds_bos=False, eos_token_id=258)
    described = describe(ModelSpec(path=str(folder)))
    assert described.family == "llama3"
    assert described.bos_token_id is None
    assert described.eos_token_ids == (257, 258)  # the tokenizer's joined to the configuration's


def test_other_families_keep_their_type_and_yarn_stretches(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, rope_parameters=rope)).save_pretrained(tmp_path)
    byte_tokenizer(adds_bos=False).save_pretrained(tmp_path)
    described = describe(ModelSpec(path=str(tmp_path)))
    assert (described.family, described.context_length) == ("qwen3", 2048)


def test_revision_follows_content(llama, broken):
    revision = describe(ModelSpec(path=str(llama))).revision
    assert describe(ModelSpec(path=str(broken))).revision == revision  # another path, the same bytes
    weights = (broken / "model.safetensors").read_bytes()
    changed = bytes([weights[-1] ^ 1])
    (broken / "model.safetensors").write_bytes(weights[:-1] + changed)
    assert describe(ModelSpec(path=str(broken))).revision != revision


def test_revision_of_large_weights_is_sampled(broken, monkeypatch):
    weights = bytearray((broken / "model.safetensors").read_bytes())
    monkeypatch.setattr(model_files, "WHOLE_FILE_LIMIT", len(weights) // 2)
    before = model_files.folder_identity(broken)
    weights[-5000] ^= 1
    (broken / "model.safetensors").write_bytes(weights)
    assert model_files.folder_identity(broken) != before


def test_unknown_name_lists_the_known():
    message = failure(name="gpt17")
    assert "model=gpt17" in message
    assert all(name in message for name in NAMED_MODELS)


def test_missing_paths_are_named(tmp_path, llama, broken):
    assert f"model.path={tmp_path / 'absent'} does not exist" in failure(path=str(tmp_path / "absent"))
    assert "has no config.json" in failure(path=str(tmp_path))
    (broken / "model.safetensors").unlink()
    assert "has no weights" in failure(path=str(broken))


def test_cut_off_weights(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"cannot load the weights of {broken}" in failure(path=str(broken))


def test_weights_that_lack_a_tensor_are_refused(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lack 9 tensors of the configuration, the first model.layers.2." in failure(path=str(broken))


def test_unreadable_configuration_and_tokenizer(broken, tmp_path):
    (broken / "config.json").write_text("{")
    assert str(broken) in failure(path=str(broken))
    (broken / "config.json").write_text('{"model_type": "unheard_of"}')
    assert "unheard_of" in failure(path=str(broken))


def test_unreadable_tokenizer(broken):
    (broken / "tokenizer.json").write_text("{")
    assert f"cannot load the tokenizer of {broken}" in failure(path=str(broken))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int4"), ("device", "tpu"), ("device", "cuda:x"), ("device", "cpu:1")],
)
def test_unaccepted_dtype_and_device(field, value):
    with pytest.raises(ModelError, match=f"model.{field}={value}: accepted are"):
        ModelSpec(**{field: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_absent_gpu(llama):
    assert "this machine has 0 CUDA devices" in failure(path=str(llama), device="cuda")


class Response:
    headers: dict = {}  # noqa: RUF012
    status_code = 403
    request = None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.GatedRepoError("gated", response=Response()), "gated: accept its terms.*hf auth login.*HF_TOKEN"),
        (errors.RepositoryNotFoundError("absent", response=Response()), "the hub has no model"),
        (errors.RevisionNotFoundError("absent", response=Response()), "has no revision 'v9'"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (OSError("Name or service not known"), "no answer from the hub .*Name or service not known.*check the network"),
    ],
)
def test_hub_refusals_are_one_line(monkeypatch, error, expected):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(ModelError, match=expected) as raised:
        describe(ModelSpec(name="llama31_8b", revision="v9"))
    message = str(raised.value)
    assert message.startswith("model=llama31_8b: ")
    assert "meta-llama/Llama-3.1-8B-Instruct" in message
    assert "\n" not in message


def test_named_models_have_a_source():
    for origin in NAMED_MODELS.values():
        assert origin.startswith("hub:") or origin in sources.SOURCES


def test_import_is_cheap():
    code = "import sys, eval.models; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'gguf')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0


@pytest.fixture(scope="module")
def smollm2():
    if not store.is_cached(sources.SOURCES["model/smollm2_135m"]):
        pytest.skip("model/smollm2_135m is not cached; run `python -m eval.data fetch --for tests`")
    return load_model(ModelSpec(device="cpu"))


def test_embedded_model_is_what_it_says(smollm2):
    assert (smollm2.family, smollm2.context_length, smollm2.eos_token_ids) == ("llama", 8192, (2,))
    assert smollm2.revision.startswith("gguf-b179c9523d0e6a0f")
    assert smollm2.model.lm_head.weight is smollm2.model.get_input_embeddings().weight
    assert not hasattr(smollm2.model.config, "quantization_config")


def test_embedded_tokenizer_is_the_published_one(smollm2):
    tokenizer = smollm2.tokenizer
    # Digits stand alone and do not glue to the white space before them; no start token is added.
    assert smollm2.bos_token_id is None
    assert tokenizer.tokenize("is  12\n\n34") == ["is", "ĠĠ", "1", "2", "ĊĊ", "3", "4"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|>user", add_special_tokens=False).input_ids[0] == 1
    text = "Ünïcode 你好, 12.5 % of  it.\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_embedded_model_answers(smollm2):
    ids = torch.tensor([smollm2.tokenizer("The capital of France is").input_ids])
    tokens = smollm2.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert smollm2.tokenizer.decode(tokens).strip().startswith("Paris")
