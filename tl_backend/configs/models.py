"""The models whose problems are tuned, and the problems of any model from its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tl_backend.errors import InvalidInputError, UnsupportedError, describe
from tl_backend.problem import AttentionProblem

PAGE_SIZES = (16, 128)
TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The attention of a model, as its config.json has it.

    Attributes:
        name: fit for a file.
        num_q_heads, num_kv_heads, head_dim, soft_cap, sinks_dtype: of every layer, on one GPU.
        windows: of its layers, each once; None for layers without one.
        dtype: of its weights.
    """

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    sinks_dtype: str | None = None
    dtype: str = "bfloat16"

    def problems(self, *, tp_size: int = 1, page_size: int = 16, dtype: str | None = None) -> list[AttentionProblem]:
        """The problems of one rank, one a window; none where vLLM does not divide the heads among so many ranks.

        A kv head is on several ranks where there are more ranks than kv heads.

        Raises:
            UnsupportedError: no kernel serves them.
        """
        larger, smaller = max(self.num_kv_heads, tp_size), min(self.num_kv_heads, tp_size)
        if self.num_q_heads % tp_size or larger % smaller:
            return []
        dtype = dtype or self.dtype
        return [
            AttentionProblem(
                num_q_heads=self.num_q_heads // tp_size,
                num_kv_heads=max(1, self.num_kv_heads // tp_size),
                head_dim=self.head_dim,
                head_dim_v=self.head_dim,
                dtype=dtype,
                kv_dtype=dtype,
                out_dtype=dtype,
                page_size=page_size,
                window=window,
                soft_cap=self.soft_cap,
                sinks_dtype=self.sinks_dtype,
            )
            for window in self.windows
        ]


# Each stands for all of its attention: layer counts, experts and vocabularies do not matter here. From the models'
# config.json.
MODELS = (
    Model(name="llama-3-8b", num_q_heads=32, num_kv_heads=8),
    Model(name="llama-3-70b", num_q_heads=64, num_kv_heads=8),
    Model(name="qwen2.5-7b", num_q_heads=28, num_kv_heads=4),
    Model(name="qwen3-8b", num_q_heads=32, num_kv_heads=8),
    Model(name="mistral-7b", num_q_heads=32, num_kv_heads=8, windows=(4096, None)),  # v0.1, and the later ones.
    Model(name="gemma-2-9b", num_q_heads=16, num_kv_heads=8, head_dim=256, windows=(4096, None), soft_cap=50.0),
    Model(name="gemma-3-27b", num_q_heads=32, num_kv_heads=16, windows=(1024, None)),
    Model(name="gpt-oss-20b", num_q_heads=64, num_kv_heads=8, head_dim=64, windows=(128, None), sinks_dtype="bfloat16"),
    Model(
        name="gpt-oss-120b", num_q_heads=64, num_kv_heads=8, head_dim=64, windows=(128, None), sinks_dtype="bfloat16"
    ),
    Model(name="phi-4", num_q_heads=40, num_kv_heads=10),
)


def problems(
    models: Iterable[Model] = MODELS, tp_sizes: Iterable[int] = TP_SIZES, page_sizes: Iterable[int] = PAGE_SIZES
) -> dict[str, AttentionProblem]:
    """The problems of models by a name such as "gemma-2-9b tp2 page16 window4096".

    Several names can have one problem, and several problems one ``ProblemKey``.
    """
    tp_sizes, page_sizes = tuple(tp_sizes), tuple(page_sizes)
    return {
        f"{model.name} tp{tp_size} page{page_size}" + (f" window{problem.window}" if problem.window else ""): problem
        for model in models
        for tp_size in tp_sizes
        for page_size in page_sizes
        for problem in model.problems(tp_size=tp_size, page_size=page_size)
    }


def shipped_now() -> dict[str, AttentionProblem]:
    """The part of the list that the shipped tables hold: whole, and on two ranks."""
    return problems([model for model in MODELS if model.name in ("llama-3-8b", "qwen2.5-7b")], tp_sizes=(1, 2))


def model_from_hf_config(config: Mapping[str, Any], *, name: str = "model") -> Model:
    """The attention of a model's config.json.

    Args:
        config: the file's object. Of a model of several parts the text part counts (``text_config``).
        name: of the model.

    Raises:
        InvalidInputError: it has no head counts, or malformed ones.
        UnsupportedError: its attention is one that no kernel has.
    """
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else dict(config)
    for field in ("kv_lora_rank", "attention_chunk_size"):
        if text.get(field):
            raise UnsupportedError(
                describe(
                    f"{field} of {name}",
                    value=text[field],
                    limit="no kernel has this attention",
                    remedy="Serve this model with another attention backend.",
                )
            )
    num_q_heads = _number(text, "num_attention_heads", name)
    num_kv_heads = (
        num_q_heads if text.get("num_key_value_heads") is None else _number(text, "num_key_value_heads", name)
    )
    head_dim = (
        _number(text, "hidden_size", name) // num_q_heads
        if text.get("head_dim") is None
        else _number(text, "head_dim", name)
    )
    return Model(
        name=name,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=_windows(text, name),
        soft_cap=_cap(text, name),
        sinks_dtype=_dtype(text) if text.get("model_type") == "gpt_oss" else None,
        dtype=_dtype(text),
    )


def problem_from_hf_config(
    config: Mapping[str, Any], *, tp_size: int = 1, page_size: int = 16, dtype: str | None = None
) -> list[AttentionProblem]:
    """The problems of one rank of a model, one for each window that its layers have.

    Args:
        config: the object of its config.json.
        tp_size: ranks that share its heads.
        page_size: of the KV cache.
        dtype: "bfloat16", ...; default the model's.

    Raises:
        InvalidInputError: the config is malformed, or its heads do not divide among the ranks.
        UnsupportedError: no kernel serves its attention.
    """
    model = model_from_hf_config(config)
    found = model.problems(tp_size=tp_size, page_size=page_size, dtype=dtype)
    if not found:
        raise InvalidInputError(
            describe(
                "tensor-parallel size",
                value=tp_size,
                limit=f"it has to divide {model.num_q_heads} query heads, and divide or be divided by "
                f"{model.num_kv_heads} kv heads",
                remedy="Pass another one.",
            )
        )
    return found


def _windows(text: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    """The windows of a model's layers, each once."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return (None,)
    window = _number(text, "sliding_window", name)
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        # Older files leave it to the code of these models; others have the window in every layer.
        alternates = str(text.get("model_type")).startswith(("gemma2", "gemma3", "gpt_oss"))
        return (window, None) if alternates else (window,)
    by_kind = {"sliding_attention": window, "full_attention": None}  # Others are no softmax attention.
    return tuple(by_kind[kind] for kind in dict.fromkeys(map(str, kinds)) if kind in by_kind)


def _dtype(text: Mapping[str, Any]) -> str:
    """The dtype that vLLM serves a model in: float32 weights go as bfloat16."""
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "bfloat16" if dtype == "float32" else dtype


def _cap(text: Mapping[str, Any], name: str) -> float | None:
    cap = text.get("attn_logit_softcapping")
    return None if cap is None else float(_checked(cap, float, "attn_logit_softcapping", name))


def _number(text: Mapping[str, Any], field: str, name: str) -> int:
    return int(_checked(text.get(field), int, field, name))


def _checked(value: Any, kind: type, field: str, name: str) -> Any:
    if type(value) not in (int, kind) or not value > 0:
        raise InvalidInputError(
            describe(
                f"{field} of {name}",
                value=repr(value),
                limit="a positive number is needed",
                remedy="Pass the config.json of a decoder model, or name the problem with --problem.",
            )
        )
    return value
