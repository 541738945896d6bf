"""The operations that trainer and sampler share where both must compute the same bits."""
