"""``make demo``'s command, with the real vLLM: two servers, so about a minute."""

from __future__ import annotations

import pytest

from tl_backend.cli import demo


def test_the_demo_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    status = demo.main([])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "greedy tokens are equal" in out
