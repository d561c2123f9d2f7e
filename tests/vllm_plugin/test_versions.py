"""The version guard: a refusal says what was found, what is supported and what to do."""

import pytest

from tl_backend.vllm_plugin.versions import vllm_refusal


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0rc1", "0.33.1.dev3+gabc", "0.32.0+cpu"])
def test_supported(version):
    assert vllm_refusal(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.3", "1.32.0", "0.320.0", "dev"])
def test_unsupported(version):
    message = vllm_refusal(version)
    assert f"got {version};" in message
    assert "supports vLLM 0.32 and 0.33" in message
    assert "Install 'vllm>=0.32,<0.34'" in message
