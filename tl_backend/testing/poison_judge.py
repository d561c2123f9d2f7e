"""How the poison harness judges an answer: how far it is from what is wanted, and whether bits have changed.

What the harness checks is in ``testing/poison.py``, how it calls attention in ``testing/poison_run.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tl_backend.testing.cases import Batch, Case

# Relative RMS. The sum of rounding the output, and the probabilities, to the dtype is half of these.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
LSE_TOLERANCE = 1e-4  # Absolute: of a natural logarithm in float32.


class PoisonError(AssertionError):
    """A rule was broken. The message has the rule, the value, the limit and the case."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Attributes: error: relative RMS of the worst request; tolerance: its limit; request: the worst one."""

    error: float
    tolerance: float
    request: int

    def __str__(self) -> str:
        return f"relative RMS {self.error:.2e} (limit {self.tolerance:.0e}, worst in request {self.request})"


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """``|got - wanted| / |wanted|`` in float64; where ``wanted`` is all zero, 0 or infinity."""
    difference, norm = float((got.double() - wanted).norm()), float(wanted.norm())
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def judge(
    batch: Batch, out: torch.Tensor, wanted: torch.Tensor, wanted_lse: torch.Tensor | None, tolerance: float
) -> Report:
    """P1, and the error against another answer.

    Args:
        out: of ``run_poisoned``, whose log-sum-exps are the batch's.
        wanted, wanted_lse: float64, of the same shapes; ``wanted`` is zero where ``out`` must be.

    Raises:
        PoisonError: a rule was broken.
    """
    case = batch.case
    where = f"{batch.problem}; {case}"
    empty_T = (wanted == 0).flatten(1).all(1)
    if (bad := int((~out.isfinite()).sum())) > 0:
        rows = (~out.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise PoisonError(
            f"P1: {bad} of {out.numel()} output elements are not finite, in rows {rows[:8]}; the limit is 0. {where}"
        )
    if (bad := int((out[empty_T] != 0).sum())) > 0:
        raise PoisonError(f"P1: {bad} elements of padding rows or rows without keys are not 0; the limit is 0. {where}")
    if batch.lse is not None and wanted_lse is not None:
        num_tokens = sum(case.query_lens)
        _judge_lse(batch.lse[:, :num_tokens], wanted_lse[:, :num_tokens], where)
    report = worst_request(case, out, wanted, tolerance)
    if not report.error <= tolerance:
        raise PoisonError(f"error: {report}. {where}")
    return report


def worst_request(case: Case, out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Report:
    """The request whose rows are furthest from what is wanted."""
    worst, request, start = 0.0, 0, 0
    for index, length in enumerate(case.query_lens):
        error = relative_rms(out[start : start + length], wanted[start : start + length])
        start += length
        if error > worst or math.isnan(error):
            worst, request = error, index
    return Report(error=worst, tolerance=tolerance, request=request)


def _judge_lse(got: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    empty = wanted == -math.inf
    if (bad := int((empty != (got == -math.inf)).sum())) > 0:
        raise PoisonError(f"P1: {bad} log-sum-exps are -inf and should not be, or the reverse; the limit is 0. {where}")
    error = float((got.double() - wanted)[~empty].abs().max()) if bool((~empty).any()) else 0.0
    if not error <= LSE_TOLERANCE:
        raise PoisonError(f"error: log-sum-exp off by {error:.2e} (limit {LSE_TOLERANCE:.0e}). {where}")


def check_same_bits(
    batch: Batch, first: torch.Tensor, again: torch.Tensor, rule: str, what: str, requests: range | None = None
) -> None:
    """Bit equality, of all rows or of those of some requests."""
    start = 0
    for request, length in enumerate(batch.case.query_lens):
        rows = slice(start, start + length)
        start += length
        if requests is not None and request not in requests:
            continue
        if (changed := num_different(first[rows], again[rows])) > 0:
            raise PoisonError(
                f"{rule}: {changed} output elements of request {request} changed when {what}; the limit is 0. "
                f"{batch.case}"
            )
    if num_different(first[start:], again[start:]) > 0:
        raise PoisonError(f"{rule}: padding rows changed when {what}; they must stay 0. {batch.case}")


def num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; NaN equals itself."""
    kind = BITS[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())
