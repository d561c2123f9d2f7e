"""Tables for tests: of any device, with the rows that a test is about."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from tl_backend.configs.choice import Config, default_config
from tl_backend.configs.identity import BY_NAME, DeviceIdentity, spec_of
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.regime import Regime
from tl_backend.configs.rows import Measured, Ratio, Row, Settled, stored
from tl_backend.configs.table import Provenance, Table, Toolchain, document_hash
from tl_backend.problem import AttentionProblem

DAY = dt.date(2026, 2, 3)
MEASURED = Measured(
    us=50.5,
    default_us=60.25,
    times_default=Ratio(median=1.19, low=1.18, high=1.21),
    peer="fa3",
    peer_us=55.0,
    date=DAY,
    gpu="NVIDIA H200",
    driver="580.1",
)
H200 = BY_NAME["nvidia_h200"]
LLAMA = AttentionProblem(
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    out_dtype="bfloat16",
    page_size=16,
)


def regime(phase: str = "decode", query_len: int = 1, context_len: int = 3000, num_requests: int = 4) -> Regime:
    return Regime.of(phase=phase, query_len=query_len, context_len=context_len, num_requests=num_requests)


def make_row(
    problem: AttentionProblem = LLAMA, at: Regime | None = None, config: Config | None = None, device=H200
) -> Row:
    """By default with the config that is the default anyway."""
    at = at or regime()
    config = config or default_config(at.kind, problem, spec_of(device))
    return Row(problem=ProblemKey.of(problem), regime=at, config=stored(config), provenance=MEASURED)


def make_table(*rows: Row, device: DeviceIdentity = H200, settled: tuple[Settled, ...] = ()) -> Table:
    return Table.make(
        device=device,
        toolchain=Toolchain(tilelang="0.1.12", torch="2.11.0", cuda="13.0"),
        provenance=Provenance(date=DAY, gpu="NVIDIA H200", driver="580.1", tool_version="0.1.0"),
        rows=rows,
        settled=settled,
    )


def reseal(document: dict[str, Any]) -> bytes:
    """A file with a changed document and the hash of it, as somebody would write it who knows how."""
    document["content_hash"] = document_hash(document)
    return json.dumps(document).encode()
