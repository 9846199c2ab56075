"""`python -m octavo.benchmarks.benchmark_serving` is `octavo bench serve`."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    print("octavo: this module is an alias; use `octavo bench serve`.", file=sys.stderr)
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
