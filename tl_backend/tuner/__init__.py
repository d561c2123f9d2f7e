"""The search for the best config of a problem on this device, and the only writer of tables."""
