"""The command `octavo`: one module a subcommand, imported when it is called."""
