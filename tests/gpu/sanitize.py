"""The kernels under compute-sanitizer: its four tools over the launches of ``tests.gpu.launch_all``.

Run ``python -m tests.gpu.sanitize --out FILE.json``; ``--device cpu`` tries the program itself. Everything is compiled
first, side by side, into the kernel cache. Then each launch's answer is compared with the float64 reference,
without a sanitizer, and memcheck, racecheck, synccheck and initcheck run the same launches side by side. Their logs
lie beside FILE.json. Exits with 1 if an answer is wrong, or if a tool reported something or did not get through.

What a clean run says: racecheck follows shared memory alone, and not what TMA writes or wgmma reads there. memcheck
leaves TMA copies out, since ``--check-tensor-ops`` is not passed: with it memcheck 2026.4 reported "Invalid __global__
read of size 0 bytes" on an H200 for descriptors whose outermost extent is declared as 2**31 - 1, at addresses inside
the allocation. That report comes from the declared extent, not from what is read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu.launch_all import keys, launches, run_all
from tests.gpu.sweep import machine
from tl_backend.device import DeviceSpec
from tl_backend.errors import describe
from tl_backend.ops.prepare import load_kernels
from tl_backend.telemetry.launches import counts

# Each tool's own options, and those of the launches.
TOOLS: dict[str, tuple[list[str], list[str]]] = {
    "memcheck": (["--report-api-errors", "no", "--padding", "512", "--destroy-on-device-error", "kernel"], []),
    "racecheck": (["--racecheck-report", "analysis"], []),
    "synccheck": ([], []),
    "initcheck": ([], ["--uninitialised"]),
}
# Taken where the tool has it: shared memory, too.
NEWER = {"initcheck": ["--initcheck-address-space", "all"]}
OUR_KERNELS = "kns=_kernel_kernel"  # TileLang appends "_kernel" to a program's name, which ends so itself here.
REPORTED = 9  # The exit code that the sanitizer is asked for.
FIRST_PORT = 49152  # Tools that run at once need ports of their own.
LAST_LAUNCH_S = 40.0  # What a launch that began in time, and the end of the process, may take beyond it.
REPORT = re.compile(
    r"========= ((?:Error|Warning|WARNING|Invalid|Barrier|Uninitialized|Potential|Missing|Mismatch|Misaligned|"
    r"Divergent|Program hit|Internal|Unable|Target|Fatal|Detected)\b.*)"
)

# What a sanitizer must report, or its silence says nothing: 32 threads of which 16 write past 256 integers; and threads
# that read each other's shared memory without a barrier. Kernel names pass the filter.
FAULTS = """
__global__ void bounds_kernel_kernel(int *p) { p[threadIdx.x + 240] = 1; }
__global__ void race_kernel_kernel(int *p) {
  __shared__ int s[256];
  s[threadIdx.x] = p[threadIdx.x];
  p[threadIdx.x] = s[(threadIdx.x + 64) % 256];
}
int main(int argc, char **) {
  int *p = nullptr;
  if (cudaMalloc(&p, 256 * sizeof(int)) != cudaSuccess) return 3;
  cudaMemset(p, 0, 256 * sizeof(int));
  if (argc > 1) race_kernel_kernel<<<1, 256>>>(p);
  else bounds_kernel_kernel<<<1, 32>>>(p);
  cudaDeviceSynchronize();
}
"""
PLANTED = {"memcheck": ([], "Invalid __global__ write"), "racecheck": (["race"], "Race reported")}


@dataclass
class Result:
    """What a tool said.

    Attributes:
        exit: the process's exit code, or "out of time".
        launched, of: launches that the process came to, and all.
        reports: how many of each kind, most frequent first, each with the launches that it came in.
    """

    tool: str
    exit: int | str
    launched: int
    of: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit == 0 and not self.reports and self.launched == self.of > 0

    def __str__(self) -> str:
        count = sum(report["count"] for report in self.reports)
        lines = [
            f"{'ok  ' if self.ok else 'MISS'} {self.tool:10} {self.launched} of {self.of} launches, {count} reports, "
            f"exit {self.exit}, {self.seconds:.0f} s"
        ]
        for report in self.reports:
            lines.append(f"     {report['count']:5} x {report['kind']}, in {len(report['cases'])} launches:")
            lines += [f"           {case}" for case in report["cases"][:4]]
        return "\n".join(lines)


def parse(tool: str, log: str, code: int | str, of: int) -> Result:
    """Count a log's reports by kind (without addresses) and by the launch that ran."""
    case, launched = "before the first launch", 0
    kinds: dict[str, Counter[str]] = {}
    for line in log.splitlines():
        if line.startswith("CASE "):
            case = line.removeprefix("CASE ")
        launched += line.startswith("DONE ")
        if found := REPORT.match(line):
            kind = re.sub(r"0x[0-9a-f]+", "0x...", found[1].strip())
            kind = re.sub(r"\d+ hazards?", "hazards", kind)[:200]
            kinds.setdefault(kind, Counter())[case] += 1
    reports = [{"kind": kind, "count": sum(cases.values()), "cases": list(cases)} for kind, cases in kinds.items()]
    return Result(tool, code, launched, of, sorted(reports, key=lambda report: -report["count"]))


def run_limited(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> int | str:
    """The exit code of a command whose output goes to ``log``; with all that it started it ends after ``seconds``."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"


def options_of(sanitizer: str, tool: str) -> list[str]:
    """The command line up to the program that is watched."""
    port = FIRST_PORT + 40 * list(TOOLS).index(tool)
    options = ["--tool", tool, "--error-exitcode", str(REPORTED), "--print-limit", "400", "--port", str(port)]
    options += ["--launch-timeout", "120", "--target-processes", "application-only", "--kernel-name", OUR_KERNELS]
    options += ["--num-cuda-barriers", "32", *TOOLS[tool][0]]  # A kernel has 4 to 12 mbarriers.
    if (newer := NEWER.get(tool)) and newer[0] in _output([sanitizer, "--help"]):
        options += newer
    return [sanitizer, *options]


def run_tool(sanitizer: str, tool: str, *, device: str, only: str, seconds: float, of: int, log: Path) -> Result:
    """All launches under one tool."""
    last = str(max(1.0, seconds - LAST_LAUNCH_S))
    command = [*options_of(sanitizer, tool), sys.executable, "-m", "tests.gpu.launch_all"]
    command += ["--device", device, "--only", only, "--seconds", last, *TOOLS[tool][1]]
    begin = time.monotonic()
    code = run_limited(command, log, seconds, os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    result = parse(tool, log.read_text(errors="replace"), code, of)
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def planted_faults_problem(sanitizer: str) -> str | None:
    """Why the sanitizer's silence says nothing here, or None: it reports what is planted."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        source, program, log = (Path(folder) / name for name in ("faults.cu", "faults", "log"))
        source.write_text(FAULTS)
        said = _output([toolkit_program("nvcc") or "nvcc", "-arch=native", "-o", str(program), str(source)])
        for tool, (arguments, wanted) in PLANTED.items():
            code = run_limited([*options_of(sanitizer, tool), str(program), *arguments], log, 60, dict(os.environ))
            text = log.read_text(errors="replace")
            # Not by the exit code alone: a complaint about an API call gives it, too.
            if code != REPORTED or wanted not in text:
                missed.append(f"{tool}: {(said + text)[-500:]}")
    if not missed:
        return None
    remedy = "Name a sanitizer that serves this driver with --sanitizer, and let nvcc compile the faults."
    return describe("planted faults", value="; ".join(missed), limit="each tool must report its own", remedy=remedy)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def toolkit_program(name: str) -> str | None:
    """A program on the path, or of the CUDA toolkit."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(f"{f}/bin" for f in folders if f))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sanitizer", default=toolkit_program("compute-sanitizer"), metavar="PATH")
    parser.add_argument("--only", default="", metavar="EXPRESSION", help='launches "PROBLEM, WHAT" that it finds')
    parser.add_argument("--seconds", type=float, default=330.0, help="that each tool may take")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (a dry run; no planted faults)")
    args = parser.parse_args(arguments)
    # The families' defaults, as in ``tests.gpu.sweep``: a table may have another family's tile for a problem.
    os.environ["TL_BACKEND_TABLES"] = "0"
    device = torch.device(args.device)
    chosen = launches(device, args.only)
    if not chosen:
        parser.error(f"--only {args.only!r} leaves none of {[str(launch) for launch in launches(device)]}")
    if args.sanitizer is None or not shutil.which(args.sanitizer):
        remedy = "Install the CUDA toolkit's compute-sanitizer, or name it with --sanitizer."
        parser.error(describe("sanitizer", value=args.sanitizer, limit="it must be a program", remedy=remedy))
    if device.type == "cuda" and (problem := planted_faults_problem(args.sanitizer)) is not None:
        parser.error(problem)
    wanted = keys(chosen, DeviceSpec.of(device))
    print(f"{len(chosen)} launches, {len(wanted)} kernels", flush=True)
    begin = time.monotonic()
    failed = load_kernels(wanted)
    compiled_s = time.monotonic() - begin
    wrong = {f"{key.kind} {key.problem}": message for key, message in failed.items()}
    wrong |= {str(launch): message for launch, message in run_all(chosen, device, compare=True) if message}
    torch.cuda.empty_cache()
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        jobs = [
            pool.submit(
                run_tool,
                args.sanitizer,
                tool,
                device=args.device,
                only=args.only,
                seconds=args.seconds,
                of=len(chosen),
                log=args.out.with_suffix(f".{tool}.log"),
            )
            for tool in TOOLS
        ]
        results = [job.result() for job in jobs]
    for name, message in wrong.items():
        print(f"MISS {name}: {message}")
    print(*results, sep="\n")
    version = re.search(r"[Vv]ersion\D*([\d.]+\d)", _output([args.sanitizer, "--version"]))
    document = {
        **machine(device),
        "sanitizer": version[1] if version else "",
        "kernels": len(wanted),
        "compile_s": round(compiled_s, 1),
        "compared": len(chosen),
        "launches": counts(),
        "wrong": wrong,
        "tools": [asdict(result) | {"ok": result.ok} for result in results],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if not wrong and all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
