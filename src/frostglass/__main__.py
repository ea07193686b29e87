"""Run the command line with `python -m frostglass`."""

from frostglass.cli.main import main

if __name__ == "__main__":
    main()
