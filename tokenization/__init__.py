"""EngramTokenizer and n-gram hashing."""
