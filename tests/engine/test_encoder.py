"""An encoder with windows (ModernBERT) on the CPU: embeddings equal those of vLLM's own backend."""

import json

import pytest
import torch

from tests.engine.faults import FAULTS, WINDOW_FAULT
from tl_backend.testing.checkpoint import VOCAB_SIZE, write_byte_tokenizer

TOLERANCE = 1e-4  # Of the relative distance of two embeddings: two float32 attentions add in different orders.
LAYERS = 4
PLANTED = (*FAULTS[:2], WINDOW_FAULT)  # No mask to shift: every token sees all, or a window on both sides.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Every second layer has a window; scores have a standard deviation of some units, so that faults show."""
    from transformers import ModernBertConfig, ModernBertModel

    path = tmp_path_factory.mktemp("modernbert")
    special = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "cls_token_id": 256, "sep_token_id": 257}
    config = ModernBertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=512, global_attn_every_n_layers=2, local_attention=32, **special,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = ModernBertModel(config)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1 if "embeddings" in name else weight.shape[1] ** -0.5)
            if "Wqkv" in name:
                weight[: 2 * config.hidden_size] *= 2
    encoder.save_pretrained(path)
    write_byte_tokenizer(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["ModernBertModel"]}))
    return path


def distances(actual, expected):
    pairs = zip(torch.tensor(actual), torch.tensor(expected), strict=True)
    return [float((a - e).norm() / e.norm()) for a, e in pairs]


def test_embeddings_equal_the_builtin_backends_and_planted_faults_show(model, run_llm, fault_env):
    builtin, launches = run_llm(model, None, program="embed_child.py")
    assert launches == {}
    task = {"faults": ["", *PLANTED], "fault_file": fault_env["ATTENTION_FAULT_FILE"]}
    ours, launches = run_llm(model, "tilelang", {"TL_BACKEND_CPU": "1"} | fault_env, program="embed_child.py", **task)
    assert launches["prefill"] >= LAYERS * len(ours)
    assert set(launches) == {"prefill"}  # There is no cache to write to.
    assert max(distances(ours[""], builtin[""])) <= TOLERANCE
    for fault in PLANTED:
        # A prompt shorter than the window does not show a longer one.
        assert max(distances(ours[fault], builtin[""])) > 10 * TOLERANCE, fault
