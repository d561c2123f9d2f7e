"""The entry point: found, light, idempotent, safe under spawn, and clear where it cannot work."""

import copy
import copyreg
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import vllm.version
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tl_backend.errors import EnvironmentProblemError, UnsupportedError
from tl_backend.vllm_plugin import versions
from tl_backend.vllm_plugin.backend import TileLangBackend


def test_the_entry_point_is_installed(register):
    (entry,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "tilelang")
    assert entry.load() is register.register


def output(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_module_imports_nothing_heavy():
    code = "import sys, tl_backend.vllm_plugin.register; print({'torch', 'tilelang', 'vllm'} & set(sys.modules))"
    assert output(code) == "set()\n"


def test_registering_does_not_import_tilelang():
    code = (
        "import sys; from tl_backend.vllm_plugin.register import register; register(); print('tilelang' in sys.modules)"
    )
    assert output(code) == "False\n"


# In a process of its own, on what it takes for each platform; at last it does what must not be done.
CUDA_PROBE = """
import torch
calls = []
for name in ("_lazy_init", "init", "current_device", "set_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *args, name=name, **named: calls.append(name))
from vllm.platforms import current_platform
from tl_backend.vllm_plugin.register import register
for platform in ("cpu", "cuda", "rocm"):
    type(current_platform).is_cpu = lambda self: platform == "cpu"
    type(current_platform).is_rocm = lambda self: platform == "rocm"
    register()
import tl_backend.vllm_plugin.backend, tl_backend.vllm_plugin.builder, tl_backend.vllm_plugin.impl
print(calls, torch.cuda.is_initialized())
try:
    tl_backend.device.DeviceSpec.of(torch.device("cuda"))
except Exception:
    pass
print(calls)
"""


def test_registering_and_importing_do_not_touch_cuda():
    """CASES.md B25: a process that has initialised CUDA cannot fork workers."""
    before, after = output(CUDA_PROBE).splitlines()[-2:]
    assert before == "[] False"
    assert after != "[]"


def test_registers_once(register):
    members = list(AttentionBackendEnum.__members__)
    register.register()
    assert list(AttentionBackendEnum.__members__) == members
    assert AttentionBackendEnum["TILELANG"].get_class() is TileLangBackend


def test_the_dotted_path_leads_back_to_the_class():
    """VLLM passes classes between its parts as paths."""
    assert resolve_obj_by_qualname(".".join(TileLangBackend.full_cls_name())) is TileLangBackend


@pytest.mark.parametrize("dump", [pickle.dumps, pickle._dumps], ids=["C", "Python"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_the_member_pickles_by_name(register, dump, protocol):
    member = AttentionBackendEnum["TILELANG"]
    assert pickle.loads(dump(member, protocol)) is member  # noqa: S301
    assert copy.deepcopy(member) is member


def test_other_members_pickle_as_before(register):
    for member in AttentionBackendEnum:
        assert pickle.loads(pickle.dumps(member)) is member  # noqa: S301


def test_a_spawned_process_unpickles_the_member_before_it_loads_plugins(register):
    """As vLLM hands its config to the engine core; ``getattr`` is the least that a child can run."""
    config = AttentionConfig(backend="tilelang")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(getattr, (AttentionBackendEnum["TILELANG"], "name")) == "TILELANG"
        assert pool.apply(getattr, (config, "backend")) is AttentionBackendEnum["TILELANG"]


def test_without_the_reducer_a_fresh_process_cannot_unpickle(register, monkeypatch):
    """Shows that the test above tests something."""
    monkeypatch.delitem(copyreg.dispatch_table, AttentionBackendEnum)
    data = pickle.dumps(AttentionBackendEnum["TILELANG"])
    with pytest.raises(subprocess.CalledProcessError) as caught:
        output(f"import pickle; pickle.loads({data!r})")
    assert "is not a valid AttentionBackendEnum" in caught.value.stderr


def current_cpu_backend(backend=None, member="CPU_ATTN"):
    config = VllmConfig(attention_config=AttentionConfig(backend=backend))
    with set_current_vllm_config(config):
        return AttentionBackendEnum[member].get_class()


def test_cpu_platform_keeps_its_own_backend_unless_asked(register):
    assert current_cpu_backend() is CPUAttentionBackend
    assert current_cpu_backend("cpu_attn") is CPUAttentionBackend


def test_cpu_platform_takes_tilelang_when_asked(register, monkeypatch):
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    assert current_cpu_backend() is TileLangBackend
    assert current_cpu_backend("tilelang") is TileLangBackend


def test_naming_the_backend_on_a_cpu_without_the_variable_does_not_fall_back(register):
    with pytest.raises(EnvironmentProblemError) as caught:
        current_cpu_backend("tilelang")
    assert "got TL_BACKEND_CPU unset;" in str(caught.value)
    assert "only on request" in str(caught.value)
    assert "Set TL_BACKEND_CPU=1 (and --dtype float32)" in str(caught.value)


def test_a_malformed_variable_does_not_fall_back(register, monkeypatch):
    monkeypatch.setenv("TL_BACKEND_CPU", "yes")
    with pytest.raises(EnvironmentProblemError, match="TL_BACKEND_CPU: got 'yes'; 0 or 1"):
        current_cpu_backend()


MLA_MEMBERS = ["CPU_MLA", "AMX_MLA"]  # What that platform takes for MLA models; no kernel here has MLA.


@pytest.mark.parametrize("member", MLA_MEMBERS)
def test_mla_is_vllms_own_unless_asked(register, member):
    own = resolve_obj_by_qualname(AttentionBackendEnum[member].value)
    assert current_cpu_backend(member=member) is own
    assert own.is_mla()


@pytest.mark.parametrize("backend", [None, "tilelang"])
@pytest.mark.parametrize("member", MLA_MEMBERS)
def test_mla_is_refused_by_name(register, monkeypatch, member, backend):
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    with pytest.raises(UnsupportedError, match=r"attention of this model: got MLA; .*\. Serve this model with"):
        current_cpu_backend(backend, member)


@pytest.mark.parametrize("member", MLA_MEMBERS)
def test_mla_with_the_backend_named_but_not_the_variable_does_not_fall_back(register, member):
    with pytest.raises(EnvironmentProblemError, match="got TL_BACKEND_CPU unset;"):
        current_cpu_backend("tilelang", member)


def test_the_variable_has_no_effect_on_a_gpu(register, monkeypatch, logged):
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    monkeypatch.setattr(register, "_is_cpu", lambda: False)
    for member in register.CPU_MEMBERS:
        AttentionBackendEnum[member].clear_override()
    register.register()
    assert not any(AttentionBackendEnum[member].is_overridden() for member in register.CPU_MEMBERS)
    assert [r.levelname for r in logged] == ["WARNING"]
    assert "TL_BACKEND_CPU=1 has no effect" in logged[0].getMessage()


@pytest.fixture
def logged(register):
    """Records of the entry point's logger; vLLM's loggers do not propagate."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    register.logger.addHandler(handler)
    yield records
    register.logger.removeHandler(handler)


def unsupported_vllm(monkeypatch):
    monkeypatch.setattr(vllm.version, "__version__", "0.40.1")


def missing_tilelang(monkeypatch):
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "tilelang" else find_spec(name, *a)
    )


def missing_compiler(monkeypatch):
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", "/nowhere")  # Kernels that are there already need none.


def unknown_variable(monkeypatch):
    monkeypatch.setenv("TL_BACKEND_CUP", "1")


def broken_vllm(monkeypatch):
    monkeypatch.setattr(versions, "vllm_refusal", lambda version: 1 / 0)


TROUBLES = {
    unsupported_vllm: ["got 0.40.1", "vLLM 0.32 and 0.33", "Install 'vllm>=0.32,<0.34'"],
    missing_tilelang: ["TileLang: got no such package", "0.1.15 or newer", "pip install 'tilelang>=0.1.15'"],
    missing_compiler: ["compiler: got no g++ or clang++", "TileLang needs one", "Install a C++ compiler"],
    unknown_variable: [
        "got TL_BACKEND_CUP",
        "the variables are TL_BACKEND_CACHE_DIR, TL_BACKEND_CPU",
        "Unset TL_BACKEND_CUP",
    ],
    broken_vllm: ["ZeroDivisionError"],
}


@pytest.mark.parametrize(("trouble", "parts"), TROUBLES.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_trouble_is_logged_once_and_stops_whoever_asks(register, monkeypatch, logged, trouble, parts):
    trouble(monkeypatch)
    register.register()
    register.register()
    (record,) = logged
    assert record.levelname == "ERROR"
    assert all(part in record.getMessage() for part in parts), record.getMessage()

    refused = AttentionBackendEnum["TILELANG"].get_class()
    for question in (  # CUDA and ROCm; the CPU; what else could come first
        lambda: refused.validate_configuration(device_capability=SimpleNamespace()),
        lambda: current_cpu_backend("tilelang"),
        lambda: refused.supports_block_size(16),
    ):
        with pytest.raises(EnvironmentProblemError) as caught:
            question()
        assert str(caught.value) in record.getMessage()


def test_only_the_first_process_of_a_server_says_it(register, monkeypatch):
    data = pickle.dumps(AttentionBackendEnum["TILELANG"])
    monkeypatch.setenv("TL_BACKEND_CUP", "1")
    for code, says in (
        ("from tl_backend.vllm_plugin.register import register; register()", True),
        (f"import pickle; pickle.loads({data!r})", False),
    ):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ("TL_BACKEND_CUP" in child.stderr) == says, child.stderr


def test_missing_tilelang_on_a_gpu(register, monkeypatch):
    missing_tilelang(monkeypatch)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    register.register()
    with pytest.raises(EnvironmentProblemError, match=r"TileLang: got no such package; 0\.1\.12 or newer .*pip"):
        AttentionBackendEnum["TILELANG"].get_class().validate_configuration()


def test_trouble_leaves_other_backends_alone(register, monkeypatch):
    unsupported_vllm(monkeypatch)
    register.register()
    assert current_cpu_backend() is CPUAttentionBackend


def test_a_registry_that_cannot_be_changed_is_logged_not_raised(register, monkeypatch, logged):
    monkeypatch.setattr(register, "_register", lambda path: 1 / 0)
    register.register()
    assert [r.levelname for r in logged] == ["ERROR"]
    assert "could not be registered. ZeroDivisionError" in logged[0].getMessage()
