"""`python -m octavo.entrypoints.openai.api_server --model X` is `octavo serve X`."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    print("octavo: this module is an alias; use `octavo serve MODEL`.", file=sys.stderr)
    sys.exit(main(["serve", *sys.argv[1:]]))
