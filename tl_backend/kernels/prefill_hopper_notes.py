"""The note that the scheduler of Hopper's prefill leaves with each tile of queries: which number of it says what.

Written in ``kernels/prefill_hopper_scheduler.py``; the warp of V, the converter and the consumers read it.
"""

# Of an item, int32 each. KV tiles count from key 0; a note of no tiles says that no more items come.
(
    NUM_TILES,  # KV tiles to walk.
    FIRST_TILE,
    FIRST_LIMIT,  # The last key that the tile's first token sees.
    FIRST_ROW,  # Query row of the tile's first token.
    NUM_TOKENS,  # From the tile's first one to the request's end; may be more than a tile holds.
    FIRST_HEAD,
    REQUEST,
    FIRST_KEY,  # The first that some query of the tile sees.
    SEQ_LEN,
    LAST_PAGE,  # Column of the block table.
    PIECE,
    PIECES,  # 1: the tile is not split.
    SLOT,  # Of the partial outputs.
) = range(13)
