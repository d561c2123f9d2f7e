"""What must not change an answer: where pages lie, how large they are, their layout, the pieces, the batch around."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_backend.ops import paged_attention
from tl_backend.testing.poison_judge import relative_rms
from tl_backend.testing.poison_run import forced_splits

H, HK, D = 4, 2, 32
ROUNDING = 1e-6  # Relative RMS; float32 sums in another order stay under it.

# (query tokens, cached tokens) of each request. Few values, so that hypothesis meets borders of pages and tiles often.
LENGTHS = st.tuples(st.sampled_from([0, 1, 2, 17, 40]), st.sampled_from([0, 1, 15, 16, 31, 33, 100]))
BATCHES = st.lists(LENGTHS, min_size=1, max_size=4).filter(lambda batch: any(new for new, _ in batch))
few = settings(max_examples=25, deadline=None, derandomize=True)
FEATURES = st.sampled_from([{}, {"window": 20}, {"soft_cap": 3.0}])


@dataclass
class Tokens:
    """Queries, keys and values of a batch, before they are laid out."""

    lengths: list[tuple[int, int]]
    features: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(13 * new + old for new, old in self.lengths))
        self.q = [2 * torch.randn(new, H, D, generator=generator) for new, _ in self.lengths]
        self.kv = [torch.randn(new + old, HK, 2 * D, generator=generator) for new, old in self.lengths]

    def attend(
        self, *, page_size: int = 16, order: int = 0, nhd: bool = False, unwritten: float = 0.0
    ) -> list[torch.Tensor]:
        """The output of each request, its pages shuffled by the seed ``order``."""
        pages = [-(-len(kv) // page_size) for kv in self.kv]
        generator = torch.Generator().manual_seed(order)
        blocks = torch.randperm(sum(pages) + 2, generator=generator).int()
        shape = (len(blocks), page_size, HK, 2 * D) if nhd else (len(blocks), HK, page_size, 2 * D)
        pool = torch.full(shape, unwritten)
        cache = pool.transpose(1, 2) if nhd else pool
        table = torch.zeros(len(pages), max([*pages, 1]), dtype=torch.int32)
        for request, (kv, count) in enumerate(zip(self.kv, pages, strict=True)):
            first = sum(pages[:request])
            table[request, :count] = blocks[first : first + count]
            position = torch.arange(len(kv))
            cache[table[request].long()[position // page_size], :, position % page_size] = kv
        lens = [len(q) for q in self.q]
        out = paged_attention(
            torch.cat(self.q),
            cache,
            table,
            torch.tensor([0, *lens]).cumsum(0).int(),
            torch.tensor([len(kv) for kv in self.kv], dtype=torch.int32),
            max_seqlen_q=max(lens),
            max_seqlen_k=max(len(kv) for kv in self.kv),
            **self.features,
        )
        return list(out.split(lens))


@few
@given(BATCHES, FEATURES, st.integers(1, 2**31))
def test_where_pages_lie_does_not_change_a_bit(lengths, features, order) -> None:
    tokens = Tokens(lengths, features)
    for a, b in zip(tokens.attend(), tokens.attend(order=order), strict=True):
        assert torch.equal(a, b)


@few
@given(BATCHES, FEATURES)
def test_the_layout_does_not_change_a_bit(lengths, features) -> None:
    tokens = Tokens(lengths, features)
    for a, b in zip(tokens.attend(), tokens.attend(nhd=True), strict=True):
        assert torch.equal(a, b)


@few
@given(BATCHES, FEATURES, st.sampled_from([float("nan"), float("inf"), -6e4]))
def test_unwritten_slots_do_not_change_a_bit(lengths, features, unwritten) -> None:
    tokens = Tokens(lengths, features)
    for a, b in zip(tokens.attend(), tokens.attend(unwritten=unwritten), strict=True):
        assert torch.equal(a, b)


@few
@given(BATCHES, FEATURES, st.sampled_from([32, 48, 544]))
def test_the_page_size_changes_rounding_alone(lengths, features, page_size) -> None:
    tokens = Tokens(lengths, features)
    for a, b in zip(tokens.attend(), tokens.attend(page_size=page_size), strict=True):
        assert relative_rms(a, b.double()) <= ROUNDING


@few
@given(BATCHES, FEATURES, st.sampled_from([2, 3, 8]))
def test_the_pieces_change_rounding_alone(lengths, features, num_splits) -> None:
    tokens = Tokens(lengths, features)
    whole = tokens.attend()
    with forced_splits(num_splits):
        cut = tokens.attend()
    for a, b in zip(whole, cut, strict=True):
        assert relative_rms(a, b.double()) <= ROUNDING


@few
@given(BATCHES, FEATURES)
def test_the_batch_around_a_request_changes_rounding_alone(lengths, features) -> None:
    """A single token decodes where it leads the batch and is prefilled behind another: other kernels, same answer."""
    tokens = Tokens(lengths, features)
    together = tokens.attend()
    for request, (q, kv) in enumerate(zip(tokens.q, tokens.kv, strict=True)):
        if len(q) == 0:
            continue
        alone = Tokens([lengths[request]], features)
        alone.q, alone.kv = [q], [kv]
        assert relative_rms(together[request], alone.attend()[0].double()) <= ROUNDING
