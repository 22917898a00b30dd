"""What the maintainers run, and no server needs: not in the package."""
