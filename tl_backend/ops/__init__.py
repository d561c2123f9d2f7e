"""Operations for users of the kernels, usable without vLLM. TileLang is imported at the first compile, not before."""

from tl_backend.ops.attention import paged_attention
from tl_backend.ops.cache_write import paged_cache_write
from tl_backend.ops.checks import unsupported_reason
from tl_backend.ops.merge import merge_attention
from tl_backend.ops.plan import AttentionPlan, plan_attention
from tl_backend.ops.prepare import prepare
from tl_backend.ops.varlen import varlen_attention
from tl_backend.ops.workspace import AttentionWorkspace

__all__ = [
    "AttentionPlan",
    "AttentionWorkspace",
    "merge_attention",
    "paged_attention",
    "paged_cache_write",
    "plan_attention",
    "prepare",
    "unsupported_reason",
    "varlen_attention",
]
