"""Generation: token after token from a decoder with a cache, for many streams at once."""
