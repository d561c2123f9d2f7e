"""``benchmarks.layer_overhead``: what it calls, and that it leaves nothing behind. Its times do not matter."""

import json
from collections import Counter

import pytest
import torch

from benchmarks import layer_overhead
from benchmarks.layer_overhead import CASES, LAYERS, Own, Step, main, measure, peer, without_kernels
from tl_backend.device import DeviceSpec
from tl_backend.ops import cache_write
from tl_backend.ops.compiled import KERNELS
from tl_backend.telemetry import launches

CPU = torch.device("cpu")
KINDS = {
    "decode 32": ["cache_write", "decode"],
    "decode 32, fp8": ["cache_write", "decode"],
    "prefill 4 x 2048": ["cache_write", "prefill_hopper"],
    "extend 64 at 32768": ["cache_write", "prefill_combine", "prefill_hopper"],
    "16 decodes, 512 at 8192": ["cache_write", "decode", "decode_combine", "prefill_hopper"],
}


@pytest.fixture(autouse=True)
def _no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do nothing are no launches of this process."""
    monkeypatch.setattr(launches, "_launches", Counter())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_launches_every_kernel_once_a_layer(case) -> None:
    step = Step(case, CPU)
    with without_kernels(CPU):
        own = Own(step, CPU)
        step.run(own.impl, own.metadata(own.plan()))
    assert launches.counts() == dict.fromkeys(KINDS[case.name], LAYERS)


def test_the_peers_two_operations_are_called_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(layer_overhead, "nothing", lambda *_, **named: calls.append(set(named)))
    with peer(Step(CASES[0], CPU)) as run:
        assert run is not None
        run()
    assert len(calls) == 2 * LAYERS
    assert sum("cu_seqlens_q" in named for named in calls) == LAYERS


def test_nothing_is_left_behind() -> None:
    get, kept = KERNELS.get, dict(cache_write.CHECKED)
    row = measure(CASES[0], CPU, rounds=2)
    assert min(row.layer_us, row.plan_us, row.peer_layer_us) > 0
    assert KERNELS.get == get
    assert kept == cache_write.CHECKED
    assert DeviceSpec.of(CPU).vendor == "cpu"
    assert torch.get_default_dtype() == torch.float32


def test_the_file_has_the_machine_and_a_row_a_case(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "rows.json"
    main(["--rounds", "1", "--out", str(file)])
    written = json.loads(file.read_text())
    assert {"gpu", "torch", "vllm", "date"} <= written["environment"].keys()
    assert [row["case"] for row in written["rows"]] == [case.name for case in CASES]
    assert capsys.readouterr().out.count("FLASH_ATTN") == len(CASES)
