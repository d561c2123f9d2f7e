"""With ``batch_invariant`` the bits of a token's output depend on its own request alone."""

import pytest
import torch

from tl_backend.testing.cases import make_problem
from tl_backend.testing.invariance import check_batch_invariance
from tl_backend.testing.poison_judge import PoisonError
from tl_backend.testing.poison_run import forced_splits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "features", [{}, {"window": 50}, {"kv_dtype": "float8_e4m3fn", "soft_cap": 2.0, "sinks_dtype": "float32"}], ids=str
)
def test_bits_depend_on_the_request_alone(features) -> None:
    check_batch_invariance(make_problem(6, 2, 32, 16, **features), 200, CPU)


def test_the_check_sees_the_other_order_of_the_decode(monkeypatch) -> None:
    """Without ``batch_invariant``, one token goes through the split-KV decode."""
    from tl_backend.testing import invariance

    workspace = invariance.AttentionWorkspace

    def usual(*args, **options):
        return workspace(*args, **options | {"batch_invariant": False})

    monkeypatch.setattr(invariance, "AttentionWorkspace", usual)
    with forced_splits(3), pytest.raises(PoisonError, match="batch invariance"):
        check_batch_invariance(make_problem(6, 2, 32, 16), 200, CPU)
