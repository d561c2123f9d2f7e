"""A step of vLLM without an engine: its attention layers, our builder, and what vLLM passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tl_backend.ops.reference import paged_attention_reference
from tl_backend.vllm_plugin.builder import TileLangMetadataBuilder

PAGE = 32
CPU = torch.device("cpu")


def common(query_lens: list[int], seq_lens: list[int], /, **changes: Any) -> CommonAttentionMetadata:
    """What vLLM hands the builder for these requests, with ``changes``."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return CommonAttentionMetadata(
        **{
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "num_reqs": len(query_lens),
            "num_actual_tokens": sum(query_lens),
            "max_query_len": max(query_lens),
            "max_seq_len": max(seq_lens),
            "block_table_tensor": torch.zeros(len(query_lens), 8, dtype=torch.int32),
            "slot_mapping": torch.full((sum(query_lens),), -1),
        }
        | changes
    )


def _heads(layer: Any) -> tuple[int, int, int]:
    """Of query, key and value."""
    return layer.num_heads, layer.num_kv_heads, layer.num_kv_heads


@dataclass
class Step:
    """Requests whose contexts are in the cache of every layer, and queries, keys and values of their new tokens.

    Blocks that no request owns, and slots that are not written yet, are NaN.
    """

    config: Any
    names: list[str]
    query_lens: list[int]
    seq_lens: list[int]

    def __post_init__(self) -> None:
        self.layers = [self.config.compilation_config.static_forward_context[name] for name in self.names]
        page = self.config.cache_config.block_size
        first = self.layers[0]
        spec = FullAttentionSpec(
            block_size=page, num_kv_heads=first.num_kv_heads, head_size=first.head_size, dtype=torch.float32
        )
        self.builder = TileLangMetadataBuilder(spec, self.names, self.config, CPU)
        gen = torch.Generator().manual_seed(0)
        pages = [-(-length // page) for length in self.seq_lens]
        width = -(-self.config.model_config.max_model_len // page)
        self.block_table = torch.zeros(len(pages), width, dtype=torch.int32)  # Block 0 is vLLM's null block.
        blocks = (torch.randperm(sum(pages), generator=gen) + 1).int()
        slots = []
        for request, (count, length) in enumerate(zip(pages, self.seq_lens, strict=True)):
            taken, blocks = blocks.split([count, len(blocks) - count])
            self.block_table[request, :count] = taken
            position = torch.arange(length)
            slots.append(taken.long()[position // page] * page + position % page)
        self.slots = torch.cat([s[len(s) - n :] for s, n in zip(slots, self.query_lens, strict=True)])
        context = torch.cat([s[: len(s) - n] for s, n in zip(slots, self.query_lens, strict=True)])
        by_name = dict(zip(self.names, self.layers, strict=True))
        for layer in self.layers:
            if layer.kv_sharing_target_layer_name is not None:  # vLLM binds the other's cache.
                layer.kv_cache = by_name[layer.kv_sharing_target_layer_name].kv_cache
                continue
            width = 2 * layer.head_size
            layer.kv_cache = torch.full((sum(pages) + 1, layer.num_kv_heads, page, width), torch.nan)
            row = torch.randn(len(context), layer.num_kv_heads, width, generator=gen)
            layer.kv_cache[context // page, :, context % page] = row
        rows = sum(self.query_lens)
        self.qkv = [
            [torch.randn(rows, heads * layer.head_size, generator=gen) for heads in _heads(layer)]
            for layer in self.layers
        ]

    def common(self, **changes: Any) -> CommonAttentionMetadata:
        given = {"block_table_tensor": self.block_table, "slot_mapping": self.slots}
        return common(self.query_lens, self.seq_lens, **given | changes)

    def run(self, metadata: CommonAttentionMetadata | None = None, layer: int = 0, padding: int = 0) -> torch.Tensor:
        """``Attention.forward`` of a layer, with so many rows of NaN after the step's; returns ``[T, H, D]``."""
        metadata = self.common() if metadata is None else metadata
        name, module = self.names[layer], self.layers[layer]
        q, k, v = (torch.cat([x, torch.full((padding, x.shape[1]), torch.nan)]) for x in self.qkv[layer])
        built = dict.fromkeys(self.names, self.builder.build(0, metadata))
        slot_mapping = dict.fromkeys(self.names, metadata.slot_mapping)
        with set_forward_context(built, self.config, slot_mapping=slot_mapping):
            out = module(q, k, v)
        assert name == module.layer_name
        return out.view(len(q), module.num_heads, module.head_size)

    def expected(self, layer: int = 0, **features: Any) -> torch.Tensor:
        """The reference on the cache as it is now: call it after ``run``."""
        module = self.layers[layer]
        q = self.qkv[layer][0].view(-1, module.num_heads, module.head_size)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        lens = torch.tensor(self.seq_lens, dtype=torch.int32)
        return paged_attention_reference(q, module.kv_cache, self.block_table, starts, lens, **features)
