"""What the demo and the tests share: generated checkpoints and a vLLM server on loopback."""
