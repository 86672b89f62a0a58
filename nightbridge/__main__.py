"""`python -m nightbridge`."""

from nightbridge.cli.main import main

if __name__ == "__main__":
    main()
