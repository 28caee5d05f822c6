"""`python -m runtime.cli`: the command from a checkout."""

from runtime.cli.app import main

if __name__ == "__main__":
    main()
