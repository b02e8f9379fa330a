"""`python -m bench`: the command line without the installed script."""

from bench.cli.main import main

if __name__ == "__main__":
    main()
