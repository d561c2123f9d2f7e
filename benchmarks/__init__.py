"""Scripts that produce every figure that the README quotes. They need a GPU."""
