"""The gate lets the defaults pass, whatever features a problem has, and nothing that is only nearly right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.prefill_hopper import HEAD_DIMS
from tl_backend.configs.space import space
from tl_backend.device import DeviceSpec
from tl_backend.ops import decode, prefill
from tl_backend.ops.decode import Tails
from tl_backend.ops.work_list import tiling, work_list
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.gate import SAMPLES, Gate

CPU = torch.device("cpu")
PLAIN = make_problem(4, 2, 32, 16)
FEATURES = make_problem(4, 2, 32, 48, window=50, soft_cap=30.0, sinks_dtype="float32", has_alibi=True, returns_lse=True)
EIGHT_BITS = make_problem(2, 1, 32, 16, kv_dtype="float8_e4m3fn")
CONTIGUOUS = make_problem(2, 2, 32, None, causal=False)


@pytest.mark.parametrize(
    "problem", [PLAIN, FEATURES, EIGHT_BITS, CONTIGUOUS], ids=["plain", "all", "fp8", "contiguous"]
)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_defaults_pass(kind: str, problem: AttentionProblem) -> None:
    if kind == "decode" and not problem.is_paged:
        pytest.skip("contiguous keys are never decoded")
    assert Gate(kind, problem, CPU).refusal(FixedChooser(problem, DeviceSpec.of(CPU))) is None


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (8, 1), (32, 32)])
def test_a_sample_is_cut_into_pieces_by_every_candidate_of_hoppers(head_dim: int, heads: tuple[int, int]) -> None:
    """Else no search would see a combine that is wrong."""
    problem, device = make_problem(*heads, head_dim, 16, dtype="bfloat16"), DeviceSpec.absent("sm_90")
    for config in space("prefill", problem, device).kept:
        assert not isinstance(config, DecodeChoice)
        tiles = tiling(problem, config, device, splits=True)
        columns = [np.array(sample.lens).T for sample in SAMPLES["prefill"]]
        works = [work_list(problem, tiles, queries, 0, keys) for queries, keys in columns]
        assert any(len(work.split) for work in works), config


def off_by(factor: float) -> Callable[..., Tails]:
    """What launches pass, with a softmax scale that is off."""
    tails = prefill.prefill_tails

    def wrong_tails(*arguments: object) -> Tails:
        return tails(*[value * factor if isinstance(value, float) else value for value in arguments])

    return wrong_tails


def test_a_small_error_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, chooser = Gate("prefill", PLAIN, CPU), FixedChooser(PLAIN, DeviceSpec.of(CPU))
    monkeypatch.setattr("tl_backend.ops.layer.prefill_tails", off_by(1.0001))
    assert "relative RMS" in str(gate.refusal(chooser))


def test_rows_that_nobody_writes_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, chooser = Gate("decode", PLAIN, CPU), FixedChooser(PLAIN, DeviceSpec.of(CPU))
    monkeypatch.setattr("tl_backend.ops.layer.launch_decode", lambda *arguments: None)
    assert "not finite" in str(gate.refusal(chooser))


def test_reading_an_unwritten_slot_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, chooser = Gate("decode", PLAIN, CPU), FixedChooser(PLAIN, DeviceSpec.of(CPU))
    tails, kept = decode.decode_tails, []

    def one_key_too_many(*arguments: object) -> Tails:
        before, seq_lens, after = arguments[:3], arguments[3], arguments[4:]
        assert isinstance(seq_lens, torch.Tensor)
        # Where its page has room for one: past a page's end a table entry leads nowhere.
        kept.append(seq_lens + (seq_lens % 16 > 0).int())
        return tails(*before, kept[-1], *after)

    monkeypatch.setattr("tl_backend.ops.layer.decode_tails", one_key_too_many)
    assert "not finite" in str(gate.refusal(chooser))
