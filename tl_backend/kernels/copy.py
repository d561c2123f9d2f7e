"""A copy from memory to memory: the bandwidth ceiling of a device."""

from typing import Any

import tilelang.language as T

from tl_backend.configs.copy import CopyConfig, CopyProblem
from tl_backend.kernels.dialect import Dialect


def copy(problem: CopyProblem, config: CopyConfig, dialect: Dialect) -> Any:
    """The prim_func: one block a piece of ``config.words`` words, the last one shorter.

    source and target, ``num_words`` dense words each. ``piece`` is the words of a block in the dialect's stride unit:
    as an int64 argument it makes offsets 64-bit.
    """
    words, dtype = config.words, problem.dtype

    @T.prim_func
    def copy_kernel(source_ptr: T.ptr, target_ptr: T.ptr, num_words: T.int64, num_blocks: T.int32, piece: T.int64):
        source = dialect.tensor(source_ptr, [words], dtype, [piece])
        target = dialect.tensor(target_ptr, [words], dtype, [piece])
        with dialect.launch(num_blocks, config.threads) as block:
            piece_W = dialect.fragment([words], dtype)
            words_here = T.alloc_var("int64")
            words_here = num_words - T.cast(block, "int64") * words
            if words_here >= words:
                # All reads of a thread before its writes, which may not be moved before them.
                for i in dialect.parallel(words):
                    piece_W[i] = source[block, i]
                for i in dialect.parallel(words):
                    target[block, i] = piece_W[i]
            else:
                for i in dialect.parallel(words):
                    if i < words_here:
                        target[block, i] = source[block, i]

    return copy_kernel
