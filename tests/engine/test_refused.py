"""``vllm serve --attention-backend tilelang`` where the plugin is not loaded or cannot serve: it ends, and says why."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tl_backend.testing.server import ServerError

ARGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
# As if TileLang were not installed, in all processes of the server.
NO_TILELANG = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tilelang" else find_spec(name, *rest)
"""


@pytest.fixture(scope="module")
def messages(run_server, qwen3_model, tmp_path_factory):
    """What each server ended with. Both at the same time: neither gets as far as to load a model."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NO_TILELANG)

    def message(env):
        with pytest.raises(ServerError) as caught:
            run_server(qwen3_model, "tilelang", lambda server: None, {"TL_BACKEND_CPU": "1"} | env, ARGS)
        return str(caught.value)

    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    envs = {"VLLM_PLUGINS": {"VLLM_PLUGINS": "tilelagn"}, "TileLang": {"PYTHONPATH": path}}
    with ThreadPoolExecutor(len(envs)) as pool:
        return dict(zip(envs, pool.map(message, envs.values()), strict=True))


def test_a_misspelt_list_of_plugins_ends_the_server(messages):
    """CASES.md B21. vLLM does not know the name then, and serves with no other backend in its place."""
    assert "Unknown attention backend: 'TILELANG'" in messages["VLLM_PLUGINS"]


def test_a_plugin_that_cannot_serve_ends_the_server(messages):
    """CASES.md B22."""
    assert "TileLang: got no such package; 0.1.15 or newer" in messages["TileLang"]
    assert "pip install 'tilelang>=0.1.15'" in messages["TileLang"]
