"""The copy on the C target: every length bit by bit, nothing past the end; and its refusals."""

import pytest
import torch

from tl_backend.configs.copy import CopyConfig
from tl_backend.errors import InvalidInputError
from tl_backend.ops.copy import copy

WORDS = 1024  # Of a block of the default config.


@pytest.mark.parametrize("num_words", [0, 1, 3, WORDS - 1, WORDS, WORDS + 1, 5 * WORDS + 77])
@pytest.mark.parametrize("config", [None, CopyConfig(threads=4, vectors=3)], ids=["default", "small"])
def test_every_word_is_copied_and_none_behind_them(num_words: int, config: CopyConfig | None) -> None:
    source = torch.randint(-(2**31), 2**31, (num_words,), dtype=torch.int64).int()
    store = torch.full((num_words + 2 * WORDS,), 7, dtype=torch.int32)
    target = store[:num_words]
    assert copy(source, target, config=config) is target
    assert torch.equal(target, source)
    assert (store[num_words:] == 7).all()


def test_bytes_are_copied_whatever_they_mean() -> None:
    source = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")] * 3)
    target = torch.zeros(24, dtype=torch.float16)
    copy(source, target)
    assert torch.equal(target.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.zeros(8), torch.zeros(9), "target size: got 36 bytes; source has 32"),
        (torch.zeros(8)[::2], torch.zeros(4), "source strides"),
        (torch.zeros(9)[1:], torch.zeros(8), "source strides"),
        (torch.zeros(6, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8), "a multiple of 4 is copied"),
    ],
    ids=["sizes", "strided", "address", "words"],
)
def test_malformed_arguments_are_refused(source, target, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        copy(source, target)
