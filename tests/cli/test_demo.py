"""The demo's judgement and its manners, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tl_backend.cli import demo
from tl_backend.cli.demo_machine import find_machine
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError

LAYERS = demo.MODEL["num_layers"]
TOKENS = [97 + index % 26 for index in range(demo.NUM_TOKENS)]
LAUNCHES = {
    "prefill": LAYERS,
    "decode": LAYERS * (demo.NUM_TOKENS - 1),
    "decode_combine": LAYERS * (demo.NUM_TOKENS - 1),
    "cache_write": LAYERS * demo.NUM_TOKENS,
}


@pytest.fixture(autouse=True)
def served(fake_vllm: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A stand-in that does all right, on a machine without a GPU; temporary files below ``tmp_path``."""
    fake_vllm.setenv("FAKE_TOKENS", json.dumps({"tilelang": TOKENS, "built-in": TOKENS}))
    fake_vllm.setenv("FAKE_LAUNCHES", json.dumps({"tilelang": LAUNCHES}))
    fake_vllm.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "tmp").mkdir()
    fake_vllm.setenv("TMPDIR", str(tmp_path / "tmp"))
    fake_vllm.setattr(tempfile, "tempdir", None)
    return fake_vllm


def facts(log: Path) -> tuple[list[str], dict[str, str]]:
    seen = json.loads(log.read_text().splitlines()[0])
    return seen["arguments"], seen["env"]


def test_all_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main(["--log-dir", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert out.count("".join(map(chr, TOKENS))) == 2
    for kernel, count in LAUNCHES.items():
        assert f"{kernel} " in out
        assert f" {count} " in out
    assert "greedy tokens are equal" in " ".join(out.split())
    arguments, env = facts(tmp_path / "logs" / "vllm-tilelang.log")
    assert "--attention-backend tilelang" in " ".join(arguments)
    assert "--dtype float32" in " ".join(arguments)
    assert env["TL_BACKEND_CPU"] == "1"
    arguments, env = facts(tmp_path / "logs" / "vllm-built-in.log")
    assert "--attention-backend" not in arguments
    assert "TL_BACKEND_CPU" not in env
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "FAKE_TOKENS",
            {"tilelang": TOKENS, "built-in": [*TOKENS[:5], 122, *TOKENS[6:]]},
            "token 5 differs: 102 ('f') on",
        ),
        ("FAKE_TOKENS", {"tilelang": TOKENS[:-1], "built-in": TOKENS}, "of the TileLang backend: got 31; 32"),
        ("FAKE_TOKENS", {"tilelang": TOKENS, "built-in": TOKENS[:-2]}, "of the built-in backend: got 30; 32"),
        ("FAKE_LAUNCHES", {}, "Not every layer ran on TileLang"),
        ("FAKE_LAUNCHES", {"tilelang": LAUNCHES | {"decode": 93}}, "decode: got 93 launches"),
        ("FAKE_LAUNCHES", {"tilelang": LAUNCHES, "built-in": {"prefill": 4}}, "The reference ran on TileLang"),
        ("FAKE_MODE", "dies", "RuntimeError: the root of it"),
        ("FAKE_MODE", "refuses", "answered 400"),
        ("FAKE_MODE", "breaks off", "engine died"),
    ],
)
def test_each_failure_is_told(
    served: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variable: str,
    value: object,
    message: str,
) -> None:
    served.setenv(variable, value if isinstance(value, str) else json.dumps(value))
    assert demo.main([]) == 1
    out = capsys.readouterr().out
    assert "Failed." in out
    assert message in " ".join(out.split())
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_what_was_started(served: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    served.setenv("FAKE_MODE", "hangs")
    log = tmp_path / "logs" / "vllm-tilelang.log"
    command = [sys.executable, "-m", "tl_backend.cli.demo", "--log-dir", str(log.parent)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    for _ in range(600):
        if log.exists() and "child " in log.read_text():
            break
        time.sleep(0.1)
    child = int(log.read_text().split("child ")[1].split()[0])
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == demo.INTERRUPTED
    assert "Interrupted" in out
    assert list((tmp_path / "tmp").iterdir()) == []
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_missing_compiler_is_told(
    served: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    served.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        served.delenv(name, raising=False)
    assert demo.main([]) == 1
    assert "compiler: got no g++" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--log-dir", str(tmp_path / "file" / "logs")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Failed. [Errno 20] Not a directory:" in out
    assert "Traceback" not in out


def test_no_room_for_temporary_files_is_told(
    served: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    served.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert demo.main([]) == 1
    assert "Failed. [Errno 2] No such file or directory:" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("missing", ["vllm", "torch"])
def test_a_missing_package_is_told(served: pytest.MonkeyPatch, missing: str) -> None:
    served.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(
        EnvironmentProblemError, match=rf"{missing}: got no such package; .* must have it\. Run `make demo`"
    ):
        find_machine()


def test_a_missing_entry_point_is_told(served: pytest.MonkeyPatch) -> None:
    served.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(EnvironmentProblemError, match=r"tl-backend: got no entry point; .* pip install --no-deps -e"):
        find_machine()


def test_a_gpu_is_used(served: pytest.MonkeyPatch) -> None:
    served.setattr("torch.cuda.is_available", lambda: True)
    served.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    served.setattr("tl_backend.device.DeviceSpec.of", lambda device: DeviceSpec.absent("sm_90"))
    served.setattr("tl_backend.ops.environment.environment_problem", lambda device: None)
    machine = find_machine()
    assert machine.name == "a GPU"
    assert "float16" in machine.args
    assert not machine.tilelang_env
