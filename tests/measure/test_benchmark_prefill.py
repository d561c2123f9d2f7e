"""``benchmarks.prefill``: its rows, its goals, and a run of small rows on a CPU."""

import dataclasses
import json

import pytest
import torch

from benchmarks import prefill, prefill_run
from benchmarks.prefill_cases import CASES, PAGES, Case, chosen
from benchmarks.prefill_goals import failures, misses, peer_ratio, shares, summary, with_host
from benchmarks.prefill_run import Run, lines
from benchmarks.variants import parse_variants, variant_chooser
from tl_backend.configs.choice import FixedChooser
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, TLBackendError
from tl_backend.measure.peers import PEERS, Field, peers_of
from tl_backend.measure.rows import Method
from tl_backend.testing.cases import make_problem

CPU = torch.device("cpu")
FLOAT32 = {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32"}
SMALL = Case(name="B1 S8192", shape=(4, 2, 32), query_lens=(30, 9), seq_lens=(30, 150), features=FLOAT32)


def test_every_row_of_the_list_is_there_once_and_can_be_made() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 18
    workloads = [case.workload(page) for case in CASES for page in PAGES]
    assert sum(w.problem.window == 128 and w.problem.sinks_dtype == "bfloat16" for w in workloads) == 3
    assert sum(w.problem.soft_cap is not None and w.problem.head_dim == 256 for w in workloads) == 3
    assert {w.problem.kv_dtype for w in workloads if w.problem.is_quantized} == {"float8_e4m3fn"}
    assert max(w.flops for w in workloads) == pytest.approx(4 * 32 * 128 * 32768 * 32769 / 2)


def test_rows_are_chosen_by_any_of_the_words() -> None:
    assert [case.name for case in chosen(["VARLEN", "d96"])] == ["varlen 77-3000", "D96 S4096"]
    assert chosen([]) == CASES
    with pytest.raises(SystemExit):
        prefill.arguments(["--only", "no such row"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("block_n=128 heads_per_tile=1; block_n=160", [{"block_n": 128, "heads_per_tile": 1}, {"block_n": 160}]),
        ('[{"block_n": 64}]', [{"block_n": 64}]),
        ("portable", [{"portable": True}]),
        ("", []),
    ],
)
def test_variants_are_read(text: str, found: list) -> None:
    assert list(parse_variants(text).values()) == found


@pytest.mark.parametrize("text", ["block_n", "block_n=x", "[1]", "[{"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--variants"):
        parse_variants(text)


def test_a_variant_is_the_default_with_other_fields_or_says_why_not() -> None:
    problem, spec = make_problem(4, 2, 32, 16), DeviceSpec.of(CPU)
    default = FixedChooser(problem, spec).configs("prefill")[0]
    config = variant_chooser(problem, spec, {"block_m": 16}).configs("prefill")[0]
    assert config == dataclasses.replace(default, block_m=16) != default
    for overrides, said in (({"no_field": 1}, "has no no_field"), ({"heads_per_tile": 3}, "not legal")):
        with pytest.raises(TLBackendError, match=said):
            variant_chooser(problem, spec, overrides)


def torch_as_fa3(batch, answers) -> Field:
    """Torch's attention by the name of FA3; it wants one request."""
    return peers_of(batch, answers, {"fa3": PEERS["sdpa-flash"]})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Run:
    monkeypatch.setattr(prefill_run, "peer_of", torch_as_fa3)
    monkeypatch.setattr(prefill_run, "MATMUL_SIZE", {"cpu": 8})
    whole = dataclasses.replace(SMALL, query_lens=(150,), seq_lens=(150,))
    return Run(
        CPU,
        [whole, dataclasses.replace(SMALL, name="ragged")],
        (16, 128),
        method=Method(rounds=3, max_rounds=3, least_us=1e9),
        variants=parse_variants("block_m=16; no_field=1"),
        out=tmp_path / "rows.json",
        takes_defaults=True,
        row_timeout_s=600.0,
    )


def test_a_run_measures_what_it_can_and_keeps_all_rows(run: Run, capsys) -> None:
    run.compile()
    run.measure(own_ceilings=False)
    document = json.loads(run.out.read_text())
    first, second, *ragged = document["rows"]
    assert [row["problem"]["page_size"] for row in document["rows"]] == [128, 16, 128, 16]
    assert peer_ratio(first)[0] == "fa3"
    assert first["launches_a_round"] == 8
    # The same data in other pages: the same answers, and the large page's launch beside the small one's.
    assert first["error"] < 1e-5
    assert second["beside"].keys() == {"page 128"}
    assert first["beside"].keys() == {"matmul"}
    assert len(shares(document)) == 1
    assert first["step"]["tilelang"]["host_us"] > 0
    assert with_host(first, "fa3") > 0
    assert first["variants"]["block_m=16"]["us"] > 0
    assert first["variants"]["block_m=16"]["times"].keys() == {"fa3"}
    assert "has no no_field" in first["variants"]["no_field=1"]["problems"]
    # Torch does not serve these: they are failures, and did not end the run.
    assert [line.split(":")[1] for line in failures(document)] == [" no peer"] * 2
    assert all(row["kernels"].keys() == {"tilelang"} for row in ragged)
    assert "FAILED" not in capsys.readouterr().out
    assert prefill.main(["--from", str(run.out), "--plot", str(run.out.with_suffix(".png"))]) == 1
    assert run.out.with_suffix(".png").stat().st_size > 10_000


def test_a_kernel_that_does_not_compile_costs_its_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_run, "load_all", lambda keys: dict.fromkeys(keys, "a compiler's error"))
    run.compile()
    run.measure(own_ceilings=False)
    assert [row.problems for row in run.rows] == ["a compiler's error"] * 4
    assert "FAILED: a compiler's error" in lines(dataclasses.asdict(run.rows[0]))[0]


def row_of(median: float, *, name: str = "B1 S512", page: int = 128, peer: str = "fa3", **fields) -> dict:
    ratio = {"median": median, "low": median - 0.01, "high": median + 0.01}
    return {
        "name": name, "problem": {"page_size": page}, "problems": None, "times": {peer: ratio}, "absent": {},
        "beside": {}, "step": {}, "kernels": {"tilelang": {"us": 1.0, "tflops": 640.0}}, "flops": 1e12,
        "is_settled": True, **fields,
    }  # fmt: skip


def misses_of(*rows: dict) -> list[str]:
    return misses({"rows": list(rows), "ceilings": {"matmul_tflops": 800.0}, "matmul_flops": 1e12})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (row_of(0.985), ["B1 S512, page 128: 0.985 [0.975, 0.995] x fa3, 1.5% short of 1.00", "geomean of 1 rows"]),
        (row_of(0.995), ["geomean of 1 rows: 0.995 x fa3, 11.2% short of 1.12"]),
        (row_of(1.13), []),
        (row_of(1.4, peer="triton"), ["B1 S512, page 128: 1.400 [1.390, 1.410] x triton, 6.7% short of 1.50"]),
        (row_of(1.2, page=16, beside={"page 128": {"median": 0.9, "high": 0.91}}), ["B1 S512, page 16: 1.111 times"]),
        (row_of(1.2, page=16, beside={"page 128": {"median": 0.94, "high": 0.96}}), []),
        (row_of(1.2, name="B1 S8192"), []),
        (
            row_of(1.2, name="B1 S8192", kernels={"tilelang": {"us": 1.0, "tflops": 600.0}}),
            ["B1 S8192, page 128: 0.750 of the matmul rate, 6.2% short of 0.80"],
        ),
    ],
)
def test_a_goal_that_is_missed_is_told_with_how_much(row: dict, said: list[str]) -> None:
    found = misses_of(row)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_the_summary_counts_what_failed_and_what_missed() -> None:
    rows = [row_of(1.2), row_of(0.9, page=16), {**row_of(1.0), "problems": "it hangs"}]
    rows[-1]["times"] = {}
    said = summary({"rows": rows, "ceilings": {"matmul_tflops": 800.0}, "matmul_flops": 1e12})
    assert "page 16    geomean 0.900" in said
    assert "failed: 1\n  B1 S512, page 128: it hangs" in said
    assert "missed: 2" in said
