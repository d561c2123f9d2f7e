"""Each declaration of the backend, tied to what the kernels take: vLLM believes them."""

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import KVCacheLayout

from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.ops.checks import unsupported_reason
from tl_backend.problem import FLOAT8_DTYPES
from tl_backend.vllm_plugin.backend import FP8_SPELLINGS, TileLangBackend, declared_dtypes
from tl_backend.vllm_plugin.layer import LayerShape, dtype_name, kv_dtype_name, problem_of

SHAPE = LayerShape(8, 2, 64, dtype="float32", kv_dtype="float32")
SUPPORTED = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 128}
H200 = DeviceCapability(9, 0)


def refusals(**changes):
    """What vLLM's selector would say, on its own check of our declarations."""
    capability = changes.pop("device_capability", H200)
    selector = AttentionSelectorConfig(**SUPPORTED | changes)
    return TileLangBackend.validate_configuration(device_capability=capability, **selector._asdict())


def test_the_supported_configuration_passes():
    assert refusals() == []
    assert refusals(kv_cache_dtype=None, block_size=None) == []


@pytest.mark.parametrize("head_size", TileLangBackend.get_supported_head_sizes())
def test_declared_head_sizes_are_problems(head_size):
    assert refusals(head_size=head_size) == []
    assert problem_of(SHAPE._replace(head_dim=head_size)).head_dim == head_size


@pytest.mark.parametrize("head_size", [16, 24, 72, 120, 272, 528])
def test_other_head_sizes_are_refused(head_size):
    reasons = refusals(head_size=head_size)
    assert "head_size not supported" in reasons
    assert f"head size: got {head_size}; multiples of 16 from 32 to 256, and 512, are supported. Serve" in reasons[-1]
    with pytest.raises(UnsupportedError):
        problem_of(SHAPE._replace(head_dim=head_size))


# CASES.md B13, B14: what users pass, and what hybrid models come out with.
BLOCK_SIZES = [16, 32, 48, 64, 128, 256, 272, 528, 544, 672, 784, 1056, 1152, 1280, 2112, 4192, 4352]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_declared_block_sizes_are_problems(block_size):
    (declared,) = TileLangBackend.get_supported_kernel_block_sizes()
    assert declared == MultipleOf(16)
    assert block_size % declared.base == 0
    assert refusals(block_size=block_size) == []
    assert problem_of(SHAPE, page_size=block_size).page_size == block_size
    # vLLM's own choice stays: 16 on GPUs but Hopper, 128 on CPUs.
    assert TileLangBackend.get_preferred_block_size(block_size) == block_size


@pytest.mark.parametrize(("cuda", "capability"), [(True, (9, 0)), (True, (8, 0)), (True, (10, 0)), (False, (9, 0))])
def test_hopper_has_large_blocks_where_nobody_chose(cuda, capability, monkeypatch):
    """gfx90a, too, calls itself 9.0."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cuda", lambda self: cuda)
    monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: DeviceCapability(*capability))
    sizes = [TileLangBackend.get_preferred_block_size(size) for size in (16, 64, 256)]
    assert sizes == ([128, 128, 256] if cuda and capability == (9, 0) else [16, 64, 256])
    assert all(refusals(block_size=size) == [] for size in sizes)


@pytest.mark.parametrize("block_size", [1, 8, 24, 100])  # CASES.md B14.
def test_other_block_sizes_are_refused(block_size):
    reasons = refusals(block_size=block_size)
    assert "block_size not supported" in reasons
    assert f"page size: got {block_size}; positive multiples of 16 are supported. Pass --block-size 16" in reasons[-1]
    with pytest.raises(UnsupportedError):
        problem_of(SHAPE, page_size=block_size)


@pytest.mark.parametrize("arch", ["c", *SHARED_MEMORY_PER_BLOCK])
def test_declared_dtypes_are_those_of_the_kernels(arch):
    device = DeviceSpec.absent(arch)
    declared = declared_dtypes(cpu=arch == "c")
    assert [dtype_name(d) for d in declared] == list(device.dtypes)
    for dtype in declared:
        name = dtype_name(dtype)
        for kv_dtype in (name, *FLOAT8_DTYPES):
            assert unsupported_reason(problem_of(SHAPE._replace(dtype=name, kv_dtype=kv_dtype)), device) is None


def test_a_dtype_of_other_devices_is_refused():
    reasons = refusals(dtype=torch.bfloat16)
    assert "dtype not supported" in reasons
    assert "dtype: got bfloat16; float32 are supported on this device. Pass --dtype float32." in reasons[-1]


def test_declared_cache_dtypes_are_the_models_and_8_bit_floats():
    """A kernel run on each 8-bit one is in test_impl.py."""
    declared = TileLangBackend.supported_kv_cache_dtypes
    assert [name for name in declared if "8" in name] == ["fp8", "fp8_e4m3", "fp8_e5m2"]
    for name in ("auto", *FP8_SPELLINGS):
        assert refusals(kv_cache_dtype=name) == []
        assert problem_of(SHAPE._replace(kv_dtype=kv_dtype_name(name, torch.float32))).is_quantized == (name != "auto")


def test_fp8_is_the_platforms_e4m3(monkeypatch):
    assert kv_dtype_name("fp8", torch.float32) == kv_dtype_name("fp8_e4m3", torch.float32) == "float8_e4m3fn"
    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
    assert kv_dtype_name("fp8", torch.float32) == kv_dtype_name("fp8_e4m3", torch.float32) == "float8_e4m3fnuz"
    assert kv_dtype_name("fp8_e5m2", torch.float32) == "float8_e5m2"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_inc", "fp8_ds_mla", "nvfp4", "int8_per_token_head", "bfloat16"])
def test_a_cache_of_another_dtype_is_refused(kv_cache_dtype):
    reasons = refusals(kv_cache_dtype=kv_cache_dtype)
    limit = "the model's, float32, and fp8, fp8_e4m3, fp8_e5m2 are supported. Pass --kv-cache-dtype auto."
    assert reasons[-1] == f"KV-cache dtype: got {kv_cache_dtype}; {limit}"
    with pytest.raises(UnsupportedError, match="KV-cache dtype"):
        problem_of(SHAPE._replace(kv_dtype=kv_dtype_name(kv_cache_dtype, torch.float32)))


@pytest.mark.parametrize(
    "feature",
    [
        {"has_sliding_window": True},
        {"has_sink": True},
        {"use_batch_invariant": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": AttentionType.ENCODER_DECODER},
    ],
    ids=str,
)
def test_declared_features_pass(feature):
    """A kernel run with each is in test_impl.py; batch invariance in test_builder.py."""
    assert refusals(**feature) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": AttentionType.ENCODER}, "attention type AttentionType.ENCODER not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_kv_connector": True}, "KV connector not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_no_kernel_has_is_refused_by_name(changes, reason):
    assert [r for r in refusals(**changes) if r.startswith(reason)]


@pytest.mark.parametrize("arch", SHARED_MEMORY_PER_BLOCK)
def test_declared_compute_capabilities_are_those_of_the_kernels(arch, monkeypatch):
    rocm = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx950": (9, 5)}
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: arch in rocm)
    capability = rocm.get(arch) or (int(arch[3:-1]), int(arch[-1]))
    assert refusals(device_capability=DeviceCapability(*capability)) == []


@pytest.mark.parametrize(("rocm", "capability"), [(False, (7, 5)), (False, (7, 0)), (True, (11, 0)), (True, (10, 3))])
def test_other_compute_capabilities_are_refused(rocm, capability, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: rocm)
    assert "compute capability not supported" in refusals(device_capability=DeviceCapability(*capability))


def test_the_selector_may_pass_more_than_it_does_today():
    assert TileLangBackend.supports_combination(64, torch.float32, None, None, False, 1, 2, 3, 4, 5, later=True) is None


def test_layouts_are_those_with_dense_rows():
    """A kernel run on each is in test_impl.py."""
    layouts = TileLangBackend.supported_kv_cache_layouts()
    assert layouts[0] is KVCacheLayout.LBHNC
    assert set(layouts) == {layout for layout in KVCacheLayout if layout.is_block_compact}


def test_the_classes_are_vllms():
    builder, impl = TileLangBackend.get_builder_cls(), TileLangBackend.get_impl_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert issubclass(impl, AttentionImpl)
    assert not impl.can_return_lse_for_decode
    assert not impl.supports_quant_query_input
    assert not TileLangBackend.forward_includes_kv_cache_update
    assert callable(impl.do_kv_cache_update)
