"""The page of `tilefuse explain --html`: graphs before and after, regions, kernels and misses, in one file."""
