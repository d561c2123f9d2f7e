"""What outlives a step: the buffers that plans of one problem are made in, and the kernels that they launch."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from tl_backend.configs import decode as decode_config
from tl_backend.configs.choice import Chooser, PrefillConfig
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import check_supported
from tl_backend.ops.choices import chooser_for
from tl_backend.ops.compiled import KERNELS, Kernel
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.families import portable_reason
from tl_backend.ops.prefill import prefill_keys
from tl_backend.ops.work_list import COLUMNS, Work, tiling
from tl_backend.problem import AttentionProblem

# Host buffers of the work list that take turns. Each is guarded by an event, so that more steps in flight than this
# would wait for the oldest copy and never overwrite it; asynchronous scheduling has two.
NUM_HOST_BUFFERS = 4


class Kernels(NamedTuple):
    """Attributes: kind; kernel, of that kind; combine: of what it leaves in pieces."""

    kind: str
    kernel: Kernel
    combine: Kernel | None


class AttentionWorkspace:
    """Persistent buffers for the plans of one problem on one device.

    Args:
        problem: whose plans are made here.
        device: where its tensors are.
        max_num_reqs: most requests of a step.
        max_num_tokens: most query tokens of a step.
        batch_invariant: the bits of a token's output depend on its own request alone: neither on the others of the step
            nor on how its prompt is cut into chunks. Everything goes through the prefill, which adds the keys of every
            query row in the same order and the same tiles; decodes are slower.
        chooser: of the configs. Default: this device's tables.

    Raises:
        UnsupportedError: the device does not serve the problem.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        batch_invariant: bool = False,
        chooser: Chooser | None = None,
    ) -> None:
        self.spec = DeviceSpec.of(device)
        check_supported(problem, self.spec)
        self.problem = problem
        self.chooser = chooser or chooser_for(problem, self.spec, batch_invariant=batch_invariant)
        # The decode reads pages, and adds in another order than the prefill.
        self.decodes = problem.is_paged and not batch_invariant
        # How many pieces a tile of queries has depends on the batch, and pieces add in another order than a whole.
        self.splits = not batch_invariant
        self.portable_reason = portable_reason(problem, self.spec)
        self.max_num_reqs, self.max_num_tokens = max_num_reqs, max_num_tokens
        prefills = cast("tuple[PrefillConfig, ...]", self.chooser.configs("prefill"))
        decodes = cast("tuple[DecodeChoice, ...]", self.chooser.configs("decode")) if self.decodes else ()
        self.tilings = {config: tiling(problem, config, self.spec, splits=self.splits) for config in prefills}
        tilings = self.tilings.values()
        capacity = max(tiles.capacity(max_num_reqs, max_num_tokens) for tiles in tilings)
        self.work = torch.empty(capacity, COLUMNS, dtype=torch.int32, device=device)
        # Blocks of Hopper's prefill take their work by it. Of this workspace alone: launches side by side would mix.
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._hosts = [_HostBuffer(capacity, pinned=device.type == "cuda") for _ in range(NUM_HOST_BUFFERS)]
        self._turn = 0
        self._kernels: dict[tuple[PrefillConfig | DecodeChoice, bool], Kernels] = {}
        # One scratch: a step's decode has merged its pieces before its prefill writes some.
        partials = max(
            *(tiles.max_partials for tiles in tilings),
            *(
                decode_config.max_partials(
                    max_num_reqs, lanes(problem, choice.tile), self.spec, choice.blocks_per_multiprocessor
                )
                for choice in decodes
            ),
            0,
        )
        heads, head_dim = problem.num_q_heads, problem.head_dim
        self.partial_o = torch.empty(partials, heads, head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(partials, heads, dtype=torch.float32, device=device)

    def kernels(self, config: PrefillConfig | DecodeChoice, *, split: bool) -> Kernels:
        """Those of a config, with a combine if ``split``. Looked up by their keys once: keys are long to hash.

        Raises:
            EnvironmentProblemError: one is not compiled yet, and cannot be.
        """
        found = self._kernels.get((config, split))
        if found is None:
            if isinstance(config, DecodeChoice):
                keys = decode_keys(self.problem, config.tile, self.spec, split=split)
            else:
                keys = prefill_keys(self.problem, config, self.spec, splits=split)
            kernel, *combine = map(KERNELS.get, keys)
            found = Kernels(keys[0].kind, kernel, combine[0] if combine else None)
            self._kernels[config, split] = found
        return found

    def upload(self, work: Work) -> torch.Tensor:
        """Copy work to the device without waiting for it: into ``work``; the split list behind it is returned."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        return host.copy_to(self.work, work)


def lanes(problem: AttentionProblem, tile: TileConfig) -> int:
    """Blocks of one decode request and piece."""
    return problem.num_kv_heads * tile.head_tiles(problem)


class _HostBuffer:
    """A host buffer and the event after its last copy to the device."""

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        self._buffer = torch.empty(capacity, COLUMNS, dtype=torch.int32, pin_memory=pinned)
        self._rows = self._buffer.numpy()
        self._copied = torch.cuda.Event() if pinned else None

    def copy_to(self, device_buffer: torch.Tensor, work: Work) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        num_items = len(work.items)
        num_rows = num_items + len(work.split)
        self._rows[:num_items] = work.items
        self._rows[num_items:num_rows] = work.split
        device_buffer[:num_rows].copy_(self._buffer[:num_rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return device_buffer[num_items:num_rows]
