"""Workloads on a device: their tensors, their times, the peers beside them, and the file that says where."""
