"""What ``benchmarks.ncu_prefill`` reads out of ncu's output."""

import pytest

from benchmarks.ncu_prefill import lines, parse, reason_of

LOG = """==PROF== Connected to process 12
"ID","Kernel Name","gpu__time_duration.sum","sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",\
"launch__registers_per_thread","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio","launch__shared_mem_per_block"
"","","ns","%","register/thread","","","","byte"
"0","prefill_hopper_kernel","852,100","77.5","168","0.5","1.25","","204800"
"1","void cutlass::device_kernel<flash::enable_sm90<...>>(T1::Params)","900,000","nan","168","3","0.25","1","n/a"
"2","void at::native::vectorized_elementwise_kernel<4>","2,000","0","16","0","0","0","0"
"""


def test_figures_and_the_longest_stalls_of_each_kernel() -> None:
    ours, fa3, torch = parse(LOG)
    assert [kernel["program"] for kernel in (ours, fa3, torch)] == ["tilelang", "fa3", "torch"]
    assert (ours["us"], ours["tensor_pct"], ours["registers"], ours["shared_kib"]) == (
        pytest.approx(852.1),
        77.5,
        168,
        200,
    )
    assert list(ours["stalls"].items()) == [("wait", 1.25), ("barrier", 0.5)]
    assert fa3["stalls"] == {"barrier": 3.0, "wait": 0.25}
    # What is not there is told as such, and not as 0.
    assert fa3["tensor_pct"] is fa3["shared_kib"] is ours["dram_pct"] is None
    assert "tensor_pct 77.5" in lines("a row", [ours])[1]
    assert "dram_pct" not in lines("a row", [ours])[1]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "only administrators"),
        ("Traceback\nRuntimeError: no kernel", "RuntimeError: no kernel"),
        ("nothing", "no kernel was profiled: nothing"),
    ],
)
def test_why_there_is_nothing_is_told(output: str, said: str) -> None:
    assert parse(output) == []
    assert said in reason_of(output)
