"""A wing: kernels that are compiled before a server starts. No other room imports it; a server loads it by name."""
