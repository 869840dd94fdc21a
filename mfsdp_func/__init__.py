"""Owner-compute gather and scatter over sharded flat buffers, as pure functions."""
