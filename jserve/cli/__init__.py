"""The `jserve` command: `main` finds the sub-command, each module here is one of them."""
