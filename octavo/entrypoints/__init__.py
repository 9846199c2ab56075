"""Module paths that other engines made known; each calls the command line."""
