"""`python -m mesh`: the command `mesh`."""

from mesh.cli.main import main

if __name__ == "__main__":
    main()
